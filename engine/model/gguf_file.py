"""Reads the header of a GGUF file: its metadata, and where its tensors are.

The reader of the package `gguf` trusts all counts in a file: a false one keeps it busy for ever. This one refuses
whatever does not fit into the file. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpd.common.errors import CheckpointError

GGUF_FILE = "model.gguf"
"""Name of the file in a model's directory."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_MOST_ENTRIES = 1 << 24
"""Limit on the fields, tensors, entries of a list and bytes of a text: more would take minutes and all memory."""

_TOO_LARGE = 1 << 40

BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Elements and bytes of a block of each type that can be read."""

_NUMBERS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K"} | {
    14: "Q6_K",
    30: "BF16",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: `begin` and `end` are offsets into the file, and the last dimension of `shape` is contiguous."""

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of the model's architecture, which is the prefix of its metadata."""
        return str(self.metadata.get("general.architecture"))


def read_gguf(path: Path) -> GgufFile:
    """Reads a file's header.

    Raises:
        CheckpointError: The file can't be read, is truncated or damaged, or has tensors of another type.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except (OSError, ValueError) as error:  # mmap has no empty files
        raise CheckpointError(f"{path} can't be read: {error}") from None


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> GgufFile:
        if self._data[:4] != _MAGIC:
            raise CheckpointError(f"{self._path} is no GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path}: version {version} of GGUF is not supported; convert the model again")
        num_tensors, num_fields = self._count(24), self._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            metadata[name] = self._value(self._number("I"))
        places = [self._place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._damaged(f"its alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in places}
        return GgufFile(self._path, metadata, tensors)

    def _place(self) -> tuple[str, list[int], int, int]:
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return name, sizes[::-1], self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: list[int], kind: int, begin: int) -> GgufTensor:
        type_name = _NUMBERS.get(kind)
        if type_name is None:
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {kind} of GGML; what can be read are {', '.join(BLOCKS)}"
            )
        elements, block_bytes = BLOCKS[type_name]
        total = 1
        for size in shape:
            total *= size
        if not shape or not 0 < total < _TOO_LARGE or shape[-1] % elements:
            raise self._damaged(f"tensor {name} of type {type_name} has shape {shape}")
        end = begin + total // elements * block_bytes
        if end > len(self._data):
            raise self._damaged(f"tensor {name} ends after the file does")
        return GgufTensor(type_name, tuple(shape), begin, end)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(self._scalar(kind))
        inner = self._number("I")
        if inner == _STRING:
            return [self._text() for _ in range(self._count(8))]
        code = self._scalar(inner)
        count = self._count(struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"a field has type {kind}")
        return _SCALARS[kind]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self, least_bytes: int) -> int:
        """Reads the number of things that follow, each of which takes at least `least_bytes`."""
        count: int = self._number("Q")
        if count > _MOST_ENTRIES or count * least_bytes > len(self._data) - self._at:
            raise self._damaged(f"it says that {count} entries follow")
        return count

    def _text(self) -> str:
        return self._take(self._count(1)).decode("utf-8", "replace")

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._damaged("it ends within its header")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated or damaged: {problem}; download it again")
