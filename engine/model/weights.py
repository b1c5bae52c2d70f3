"""Reads the weights of a checkpoint directory.

Files are memory-mapped: a tensor uses memory only in its final place.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cpd.common.errors import CheckpointError
from engine.model.config import Dtype, read_json
from engine.ops.base import Weight
from engine.ops.quantized import GroupFormat

_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of a tensor: `begin` and `end` are offsets into the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The safetensors files of one directory. A context manager: mapped files stay open until it exits."""

    def __init__(self, model_dir: Path) -> None:
        """Reads the headers of all files.

        Raises:
            CheckpointError: A file is missing, truncated or damaged.
        """
        self._dir = model_dir
        self._entries: dict[str, TensorEntry] = {}
        self._open_files = contextlib.ExitStack()
        self._files: dict[Path, Any] = {}
        named = _files(model_dir)
        for path in dict.fromkeys(named.values()) if isinstance(named, dict) else [named]:
            self._entries.update(_read_header(path))
        if isinstance(named, dict):
            for name, path in named.items():
                if name not in self._entries:
                    raise CheckpointError(f"{path}: tensor {name} is missing, though {_INDEX} lists it")

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open_files.close()

    def __contains__(self, name: str) -> bool:
        return self.stored(name) is not None

    @property
    def dtype(self) -> Dtype:
        """Type of the embedding, for checkpoints without one in config.json."""
        entry = self._entries.get("model.embed_tokens.weight")
        if entry is None or entry.dtype not in _TORCH_DTYPES:
            return "float32"
        return _TORCH_DTYPES[entry.dtype]  # type: ignore[return-value]

    def stored(self, name: str) -> TensorEntry | None:
        """Returns where a weight is, and its type and shape; None if it is missing."""
        return self._entries.get(name)

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Checks, from the headers alone, that every expected tensor exists with its shape and a supported type.

        Raises:
            CheckpointError: A tensor is missing or wrong; the message names it.
        """
        for name, shape in expected.items():
            entry = self.stored(name)
            if entry is None:
                raise CheckpointError(
                    f"{self._dir}: tensor {name} is missing; the checkpoint is incomplete or its config.json is of "
                    "another model"
                )
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.path}: tensor {name} has shape {list(entry.shape)}, but config.json asks for "
                    f"{list(shape)}; the two are of different models"
                )
            if entry.dtype not in _TORCH_DTYPES:
                raise CheckpointError(
                    f"{entry.path}: tensor {name} has type {entry.dtype}, which is not supported; use weights in "
                    "float32, bfloat16 or float16"
                )

    def unused(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        """Lists tensors that the model does not use."""
        return [name for name in self._entries if name not in expected and not name.endswith("rotary_emb.inv_freq")]

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Reads the named tensors into a new one of `dtype` on `device`, joined along their first dimension."""
        entries = [self._entries[name] for name in names]
        rows = sum(entry.shape[0] for entry in entries)
        joined = torch.empty(rows, *entries[0].shape[1:], dtype=dtype, device=device)
        start = 0
        for name, entry in zip(names, entries, strict=True):
            joined[start : start + entry.shape[0]].copy_(self._tensor(name))
            start += entry.shape[0]
        return joined

    def group_format(self, names: Sequence[str]) -> GroupFormat | None:
        """Returns the format of the quantised weight that `read_weight` makes; None if it makes none."""
        return None

    def read_weight(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> Weight:
        """Reads the weight of a linear layer, quantised if it is so in the checkpoint; otherwise as `read`.

        Raises:
            CheckpointError: Its scales are damaged.
            ValueError: It must be quantised again, and `engine.ops.quantized.quantize` can't.
        """
        return self.read(names, dtype, device)

    def entries(self) -> Iterator[tuple[str, TensorEntry]]:
        """Yields all tensors in the order of their names."""
        yield from sorted(self._entries.items())

    def _tensor(self, name: str) -> torch.Tensor:
        path = self._entries[name].path
        if path not in self._files:
            self._files[path] = self._open_files.enter_context(safe_open(path, framework="pt"))
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor


def _files(model_dir: Path) -> Path | dict[str, Path]:
    """Returns the only safetensors file or, for a sharded checkpoint, the file of each tensor."""
    single, index_path = model_dir / "model.safetensors", model_dir / _INDEX
    if single.exists():
        return single
    if not index_path.exists():
        pickled = sorted(path.name for path in model_dir.glob("pytorch_model*.bin"))
        found = f"; {pickled[0]} cannot be used, convert the weights to safetensors" if pickled else ""
        raise CheckpointError(f"{model_dir} holds neither model.safetensors nor {_INDEX}{found}")
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index_path} has no weight_map from tensors to files; download it again")
    for file_name in dict.fromkeys(weight_map.values()):
        if Path(file_name).name != file_name:
            raise CheckpointError(
                f"{index_path} lists {file_name}, which is not a file in its directory; download it again"
            )
        if not (model_dir / file_name).is_file():
            raise CheckpointError(f"{model_dir / file_name} is missing, though {_INDEX} lists it; download it again")
    return {name: model_dir / file_name for name, file_name in weight_map.items()}


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with safe_open(path, framework="pt"):
            pass  # checks the header and the file's length
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or no safetensors file ({error}); download it again") from None
    header.pop("__metadata__", None)
    data = 8 + length
    return {
        name: TensorEntry(path, field["dtype"], tuple(field["shape"]), *(data + at for at in field["data_offsets"]))
        for name, field in header.items()
    }
