"""Reads checkpoints that llm-compressor has quantised, in the format of the library compressed-tensors.

A quantised `X.weight` has `X.weight_scale` beside it; with 4 bits its numbers are in `X.weight_packed`, eight a word.
Which layers are quantised shows in the tensors. https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from cpd.common.errors import CheckpointError
from engine.model.scheme import Scheme
from engine.model.weights import Checkpoint, TensorEntry
from engine.ops.base import Weight
from engine.ops.quantized import GROUP, GroupFormat, QuantizedWeight, joined


class CompressedCheckpoint(Checkpoint):
    """A `Checkpoint` some of whose weights are quantised.

    Integers stay what they are. Floats of 8 bits become floats of the wanted type: on a CPU nothing computes with them.
    """

    def __init__(self, model_dir: Path, scheme: Scheme) -> None:
        if scheme.group % GROUP:
            raise CheckpointError(
                f"{model_dir}: weights are quantised in groups of {scheme.group}, which must be multiples of {GROUP}"
            )
        super().__init__(model_dir)
        self._scheme = scheme

    def stored(self, name: str) -> TensorEntry | None:
        scale = self._entries.get(f"{name}_scale")
        if scale is None:
            return super().stored(name)
        values = self._values(name)
        if values is None:
            return None
        scheme, entry = self._scheme, self._entries[values]
        wanted = "I32" if scheme.packed else "I8" if scheme.kind == "int" else "F8_E4M3"
        if entry.dtype != wanted or len(entry.shape) != 2:
            raise CheckpointError(f"{entry.path}: tensor {values} is {entry.dtype} {list(entry.shape)}, not {wanted}")
        rows, columns = entry.shape[0], entry.shape[1] * (32 // scheme.bits if scheme.packed else 1)
        groups = columns // scheme.group if scheme.group else 1
        shapes = [(), (1,), (1, 1), (rows, groups), *([(rows,)] if groups == 1 else [])]
        if scale.shape not in shapes or (scheme.group and columns % scheme.group):
            raise CheckpointError(
                f"{scale.path}: tensor {name}_scale has shape {list(scale.shape)}, which does not fit weights of "
                f"{[rows, columns]}"
            )
        return TensorEntry(entry.path, "F32", (rows, columns), entry.begin, entry.end)

    def unused(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        parts = {name + suffix for name in expected for suffix in ("", "_scale", "_packed", "_shape")}
        return [name for name in super().unused(expected) if name not in parts and not name.endswith("input_scale")]

    def group_format(self, names: Sequence[str]) -> GroupFormat | None:
        quantized = [f"{name}_scale" in self._entries for name in names]
        return GroupFormat(self._scheme.bits) if all(quantized) and self._scheme.kind == "int" else None

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if not any(f"{name}_scale" in self._entries for name in names):
            return super().read(names, dtype, device)
        return torch.cat([self._dequantized(name).to(device, dtype) for name in names])

    def read_weight(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Weight:
        if self.group_format(names) is None:
            return self.read(names, dtype, device)
        return joined([self._quantized(name) for name in names])

    def _values(self, name: str) -> str | None:
        values = f"{name}_packed" if self._scheme.packed else name
        return values if values in self._entries else None

    def _dequantized(self, name: str) -> torch.Tensor:
        if f"{name}_scale" not in self._entries:
            return self._tensor(name)
        if self._scheme.kind == "int":
            return self._quantized(name).dequantize()
        return self._tensor(name).float() * self._scale(name)

    def _quantized(self, name: str) -> QuantizedWeight:
        scheme = self._scheme
        if scheme.packed:
            words = self._tensor(f"{name}_packed")
            shifts = torch.arange(0, 32, scheme.bits, dtype=torch.int32)
            values = ((words[..., None] >> shifts) & (1 << scheme.bits) - 1).flatten(1).to(torch.uint8)
        else:
            values = self._tensor(name).view(torch.uint8) ^ 128
        rows, columns = values.shape
        scales = self._scale(name).half()
        if not (scales.isfinite() & (scales > 0)).all():
            raise CheckpointError(f"{name}_scale has a scale that is 0, not finite, or outside float16")
        groups = (
            scales if scales.shape == (1, 1) else scales.repeat_interleave(columns // GROUP // scales.shape[1], dim=1)
        )
        return QuantizedWeight(scheme.bits, values, groups.expand(rows, columns // GROUP).contiguous())

    def _scale(self, name: str) -> torch.Tensor:
        """Returns the scales in float32: [rows, groups], or [1, 1] for the whole weight."""
        scale = self._tensor(f"{name}_scale").float()
        if not (scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(f"{name}_scale has a scale that is not over 0")
        return scale.view(1, 1) if scale.numel() == 1 else scale.view(scale.shape[0], -1)
