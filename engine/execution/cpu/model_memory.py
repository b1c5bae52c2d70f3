"""The memory of a model on a CPU, weights and page pool, which others can have while the model sleeps.

    resident ──release──▶ released ──restore──▶ weights resident ──populate_pool──▶ resident
                              ▲         │ an error says why it failed, and nothing is held
                              └─────────┘

The tensors keep their addresses, so that packed weights, views and pointers to pages stay valid: `release` only gives
the memory behind them back to the system. `restore` gets the weights from one of two sources:

| source          | what it holds                                       | who makes it                     |
| the staged copy | the bytes of all weights, as the kernels use them   | `stage`, until `unstage`         |
| the checkpoint  | tensors, which are read and packed again            | it must be the one of the start  |

The staged copy is host memory of its own, and never changes: going to sleep copies nothing.

Weights are copied and verified in pieces, by all cores. The checksum of each piece was made when the weights were
loaded; `restore` compares it with what is in place afterwards.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
import xxhash

from cpd.common.errors import CheckpointError, ConfigError
from engine.execution.cpu import system_memory
from engine.execution.cpu.lanes import use_threads
from engine.execution.cpu.staged_copy import StagedCopy
from engine.execution.cpu.system_memory import Bytes
from engine.execution.memory_limits import available_memory

Item = TypeVar("Item")
Result = TypeVar("Result")

ReadAgain = Callable[[], Generator[tuple[torch.Tensor, torch.Tensor], None, None]]
"""Yields each weight with a new tensor of the same content, from the checkpoint. Raises CheckpointError."""

PIECE_BYTES = 1 << 20
"""A piece is still in the core's cache when its checksum is computed."""

_RANGE_BYTES = 32 << 20
"""Memory that is released or populated in one call."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the weights.

    Attributes:
        content: Its place.
        offset: Its place in the staged copy.
        checksum: Of its content.
    """

    content: Bytes
    offset: int
    checksum: int


class ModelMemory:
    """See the module. For one thread at a time. Only `stage`, `unstage` and `populate_pool` may run beside steps.

    Args:
        weights: All tensors of the model. Their checksums are computed now.
        pool: The page pool. Its content is lost when it is released.
        read_again: Reads the weights again, with the caller's threads.
        source: The checkpoint, for messages.

    Attributes:
        num_bytes: Size of weights and pool.
        weight_bytes: Size of the weights.
    """

    def __init__(self, weights: Iterable[torch.Tensor], pool: torch.Tensor, read_again: ReadAgain, source: str) -> None:
        self._tensors = {tensor.data_ptr(): tensor for tensor in weights}  # keeps them; a tensor may be used twice
        self._pool = _bytes_of(pool)
        self._read_again = read_again
        self._source = source
        self._cores = _Cores(torch.get_num_threads())
        self._released = False
        self._staged: StagedCopy | None = None
        contents = [_bytes_of(tensor) for tensor in self._tensors.values()]
        self.weight_bytes = sum(map(len, contents))
        self.num_bytes = self.weight_bytes + len(self._pool)
        self._ranges = [part for region in (*contents, self._pool) for part in _ranges(region)]
        places = [place for content in contents for place in _divide(content, PIECE_BYTES)]
        checksums = self._cores.map(_checksum, places)
        offsets = list(accumulate(map(len, places), initial=0))
        self._pieces = [_Piece(*one) for one in zip(places, offsets, checksums, strict=False)]
        self._at = {_address(piece.content): piece for piece in self._pieces}
        for content in contents:
            system_memory.in_huge_pages(content)

    @property
    def staged_bytes(self) -> int:
        """Size of the staged copy; 0 if there is none."""
        return self._staged.num_bytes if self._staged is not None else 0

    def resident_bytes(self) -> int:
        """Measures how much of weights and pool is in memory."""
        return sum(self._cores.map(system_memory.resident_bytes, self._ranges))

    def release(self) -> None:
        """Gives the memory back, except parts of single memory pages that others use, too."""
        self._released = True
        self._cores.map(system_memory.release, self._ranges)

    def restore(self) -> None:
        """Gets the weights back. From then on steps can run; `populate_pool` gets the rest.

        Raises:
            ConfigError: There is too little memory.
            CheckpointError: The checkpoint is gone or has changed; or the staged copy was damaged, and was dropped.
        """
        available = available_memory(torch.device("cpu"))
        if available is not None and self.num_bytes > available:
            raise ConfigError(
                f"the model needs {self.num_bytes / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are free"
            )
        try:
            if self._staged is not None:
                self._copy_staged(self._staged)
            else:
                self._take_from_checkpoint(_put)
        except BaseException:
            self.release()
            raise
        self._released = False

    def populate_pool(self) -> None:
        """Makes the pool resident, so that no step waits for a page fault. Steps run meanwhile on the other cores.

        Raises:
            OSError: There is too little memory.
        """
        for part in _ranges(self._pool):
            system_memory.populate(part)

    def stage(self) -> None:
        """Makes the staged copy: from the weights, with one core, or while these are released from the checkpoint.

        Raises:
            ConfigError: There is too little memory.
            CheckpointError: The checkpoint is gone or has changed.
        """
        if self._staged is not None:
            return
        try:
            staged = StagedCopy(self.weight_bytes)
            try:
                self._write(staged)
            except BaseException:
                staged.close()
                raise
        except OSError as error:
            raise ConfigError(f"the system gave no memory for a staged copy: {error.strerror}") from None
        self._staged = staged

    def unstage(self) -> None:
        """Drops the staged copy, if there is one."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def _write(self, staged: StagedCopy) -> None:
        def write(piece: _Piece, content: Bytes) -> Bytes:
            staged.write(content, piece.offset)
            return content

        if self._released:
            self._take_from_checkpoint(write)
        else:
            for piece in self._pieces:
                write(piece, piece.content)

    def _copy_staged(self, staged: StagedCopy) -> None:
        content = staged.content()

        def copy(piece: _Piece) -> bool:
            piece.content[:] = content[piece.offset : piece.offset + len(piece.content)]
            return _checksum(piece.content) == piece.checksum

        if not all(self._cores.map(copy, self._pieces)):
            self.unstage()
            raise CheckpointError("the staged copy of the weights is damaged; the next wake reads the checkpoint")

    def _take_from_checkpoint(self, put: Callable[[_Piece, Bytes], Bytes]) -> None:
        """Reads the weights again.

        Args:
            put: Stores the content of a piece. Returns what is verified.
        """

        def take(one: tuple[_Piece, Bytes]) -> bool:
            piece, content = one
            return _checksum(put(piece, content)) == piece.checksum

        use_threads(self._cores.count)  # as at the start: then computed tables have the same bits
        with closing(self._read_again()) as weights:
            for own, fresh in weights:
                places = _divide(_bytes_of(own), PIECE_BYTES)
                contents = _divide(_bytes_of(fresh), PIECE_BYTES)
                pieces = [(self._at[_address(place)], content) for place, content in zip(places, contents, strict=True)]
                if not all(self._cores.map(take, pieces)):
                    raise CheckpointError(f"{self._source} does not hold the weights that the worker started with")


class _Cores:
    """Calls functions that release the GIL on several cores."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor = ThreadPoolExecutor(count, "model-memory")

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Returns the results when all calls have ended. Raises the first error."""
        results: dict[int, Result] = {}
        indices = iter(range(len(items)))

        def run() -> None:
            for index in indices:  # each thread takes the next one
                results[index] = function(items[index])

        calls = [self._executor.submit(run) for _ in range(min(self.count, len(items)))]
        wait(calls)
        for call in calls:
            call.result()
        return [results[index] for index in range(len(items))]


def _put(piece: _Piece, content: Bytes) -> Bytes:
    piece.content[:] = content
    return piece.content


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """A view of a contiguous tensor's memory, which does not keep the tensor."""
    assert tensor.is_contiguous()
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))


def _divide(memory: Bytes, size: int, first: int = 0) -> list[Bytes]:
    """Cuts memory at each multiple of `size`, where it begins at `first`."""
    cuts = [0, *range(-first % size or size, len(memory), size), len(memory)]
    return [memory[start:end] for start, end in pairwise(cuts)]


def _ranges(memory: Bytes) -> list[Bytes]:
    """Cuts memory where huge pages may begin: a part of one is not freed."""
    return _divide(memory, _RANGE_BYTES, _address(memory))


def _address(memory: Bytes) -> int:
    return memory.ctypes.data


def _checksum(memory: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(memory.data)
