"""Reads the weights of a GGUF file under the names that they have in Hugging Face checkpoints.

Blocks of Q8_0, Q4_0, Q4_1 and Q4_K are groups of `engine.ops.quantized` and stay what they are. Other quantised types,
and parts of a joined weight that differ in type, are dequantised and get 8 bits.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from cpd.common.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.gguf_file import BLOCKS, read_gguf
from engine.model.parameters import expected_tensors
from engine.model.weights import Checkpoint, TensorEntry
from engine.ops.base import Weight
from engine.ops.quantized import GROUP, GroupFormat, QuantizedWeight, joined, quantize

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_OF_EXPERTS = {
    **dict.fromkeys(("gate_proj", "w1"), "ffn_gate_exps"),
    **dict.fromkeys(("up_proj", "w3"), "ffn_up_exps"),
    **dict.fromkeys(("down_proj", "w2"), "ffn_down_exps"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(.+)")

_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMATS: Mapping[str, GroupFormat] = {
    "Q8_0": GroupFormat(8),
    "Q4_0": GroupFormat(4),
    "Q4_1": GroupFormat(4, has_minima=True),
    "Q4_K": GroupFormat(4, has_minima=True),
}
"""Formats of the types that are kept."""

_REQUANTIZED = GroupFormat(8)
"""Format of the others."""

_AT_ONCE = 1 << 22
"""Elements that are dequantised at once."""

_Blocks = Callable[[torch.Tensor, int], QuantizedWeight]
"""Blocks of a type, [blocks, bytes], and the number of rows -> their weight."""


class GgufCheckpoint(Checkpoint):
    """See `engine.model.weights.Checkpoint`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Reads the header.

        Args:
            config: Names the tensors that the model has.

        Raises:
            CheckpointError: The file is truncated or damaged, or has tensors that can't be read.
        """
        self._dir = path
        self._file = read_gguf(path)
        self._heads = config.num_heads, config.num_kv_heads
        self._num_experts = 0 if config.experts is None else config.experts.count
        self._entries: dict[str, TensorEntry] = {}
        self._used = {"rope_freqs.weight"}
        for name in expected_tensors(config):
            if entry := self._find(name):
                self._entries[name] = entry
        self._data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")

    def __exit__(self, *_: object) -> None:
        del self._data

    def stored(self, name: str) -> TensorEntry | None:
        entry = self._entries.get(name)
        return entry and TensorEntry(entry.path, "F32", entry.shape, entry.begin, entry.end)

    def unused(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        return [name for name in self._file.tensors if name not in self._used]

    def group_format(self, names: Sequence[str]) -> GroupFormat | None:
        types = {self._entries[name].dtype for name in names}
        if types & _PLAIN.keys():
            return None
        return _FORMATS.get(next(iter(types)), _REQUANTIZED) if len(types) == 1 else _REQUANTIZED

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        joined = torch.empty(self._shape(names), dtype=dtype, device=device)
        for rows, part in self._parts(names):
            joined[rows] = part
        return joined

    def read_weight(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Weight:
        if self.group_format(names) is None:
            return self.read(names, dtype, device)
        types = {self._entries[name].dtype for name in names}
        if len(types) > 1 or types - _GROUPED.keys():
            return self._requantized(names)
        return joined([self._grouped(name) for name in names])

    def _find(self, name: str) -> TensorEntry | None:
        expert, own_name = None, _OUTSIDE.get(name)
        if match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            if of_expert := _EXPERT.fullmatch(part):
                expert, part = int(of_expert[1]), _OF_EXPERTS[of_expert[2]]
            own_name = f"blk.{layer}.{_IN_LAYERS.get(part, part)}.{kind}"
        tensor = self._file.tensors.get(own_name or "")
        if tensor is None:
            return None
        self._used.add(own_name or "")
        shape, begin, end = tensor.shape, tensor.begin, tensor.end
        if expert is not None:
            if len(shape) != 3 or shape[0] != self._num_experts:
                raise CheckpointError(
                    f"{self._dir}: tensor {own_name} has shape {list(shape)}, which is not that of {self._num_experts} "
                    "experts; download it again"
                )
            size = (end - begin) // shape[0]
            shape, begin, end = shape[1:], begin + expert * size, begin + (expert + 1) * size
        return TensorEntry(self._dir, tensor.type, shape, begin, end)

    def _shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """Returns the shape of the named tensors, joined along their first dimension."""
        shapes = [self._entries[name].shape for name in names]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def _parts(self, names: Sequence[str]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields the joined tensor in parts that are small in memory: the rows of each, and their numbers."""
        begin = 0
        for name in names:
            entry = self._entries[name]
            rows = self._data[entry.begin : entry.end].reshape(entry.shape[0], -1)
            order = self._order(name, len(rows))
            step = max(1, _AT_ONCE // entry.shape[-1])
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                plain = self._dequantized(name, rows[part] if order is None else rows[order[part].numpy()])
                yield slice(begin, begin + len(plain)), plain
                begin += len(plain)

    def _dequantized(self, name: str, rows: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Returns the numbers of some rows of a tensor: [rows, bytes] -> [rows, ..]"""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        entry = self._entries[name]
        if entry.dtype in _PLAIN:
            return torch.from_numpy(np.array(rows)).view(_PLAIN[entry.dtype]).view(-1, *entry.shape[1:])
        with np.errstate(invalid="ignore", over="ignore"):
            plain = dequantize(rows, GGMLQuantizationType[entry.dtype])
        if not np.isfinite(plain).all():
            raise CheckpointError(f"{self._dir}: tensor {name} has scales that are not finite")
        return torch.from_numpy(plain)

    def _requantized(self, names: Sequence[str]) -> QuantizedWeight:
        rows, columns = self._shape(names)
        values = torch.empty(rows, columns, dtype=torch.uint8)
        scales = torch.empty(rows, columns // GROUP, dtype=torch.float16)
        for part, plain in self._parts(names):
            quantized = quantize(plain, _REQUANTIZED.bits)
            values[part], scales[part] = quantized.values, quantized.scales
        return QuantizedWeight(_REQUANTIZED.bits, values, scales)

    def _grouped(self, name: str) -> QuantizedWeight:
        entry = self._entries[name]
        rows = entry.shape[0]
        blocks = torch.from_numpy(np.array(self._data[entry.begin : entry.end]))
        weight = _GROUPED[entry.dtype](blocks.view(-1, BLOCKS[entry.dtype][1]), rows)
        numbers = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
        if not all(each.isfinite().all() for each in numbers) or not weight.scales.any():
            raise CheckpointError(f"{self._dir}: the scales of tensor {name} are all 0, or some are not finite")
        order = self._order(name, rows)
        if order is None:
            return weight
        minima = None if weight.minima is None else weight.minima[order]
        return QuantizedWeight(weight.bits, weight.values[order], weight.scales[order], minima)

    def _order(self, name: str, rows: int) -> torch.Tensor | None:
        """Returns the order in which Hugging Face has the rows; None if it is the file's.

        Files of Llama have the two dimensions that rotate together side by side, and Hugging Face half a head apart.
        """
        heads = {"q_proj": self._heads[0], "k_proj": self._heads[1]}.get(name.split(".")[-2])
        if self._file.architecture != "llama" or heads is None:
            return None
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def _halves(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """The number in float16 in which blocks have their bytes 2 · index and the next."""
    return blocks[:, 2 * index : 2 * index + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[.., bytes] -> [.., 2 · bytes]: all lower halves, then all upper ones"""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _q8_0(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    return QuantizedWeight(8, (blocks[:, 2:] ^ 128).reshape(rows, -1), _halves(blocks, 0).view(rows, -1))


def _q4(blocks: torch.Tensor, rows: int, *, has_minima: bool) -> QuantizedWeight:
    minima = -_halves(blocks, 1).view(rows, -1) if has_minima else None
    values = _nibbles(blocks[:, 4 if has_minima else 2 :]).view(rows, -1)
    return QuantizedWeight(4, values, _halves(blocks, 0).view(rows, -1), minima)


def _q4_k(blocks: torch.Tensor, rows: int) -> QuantizedWeight:
    """Eight groups, whose scales and minima are numbers of 6 bits times one in float16."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    return QuantizedWeight(
        4,
        _nibbles(blocks[:, 16:].reshape(len(blocks), 4, GROUP)).view(rows, -1),
        (_halves(blocks, 0).float() * scales).half().view(rows, -1),
        (_halves(blocks, 1).float() * minima).half().view(rows, -1),
    )


_GROUPED: Mapping[str, _Blocks] = {
    "Q8_0": _q8_0,
    "Q4_0": partial(_q4, has_minima=False),
    "Q4_1": partial(_q4, has_minima=True),
    "Q4_K": _q4_k,
}
