"""The memory of a model on a CPU, weights and page pool, which others can have while the model sleeps.

    resident ──release──▶ released ──restore──▶ weights resident ──populate_pool──▶ resident
                              ▲         │ an error says why it failed, and nothing is held
                              └─────────┘

All weights are in one memory, which consists of whole huge pages. `ModelMemory` moves them there when it is made. From
then on the tensors keep their addresses: `release` only gives the memory behind them back to the system. `restore` gets
the weights from one of two sources:

| source          | what it holds                                       | who makes it                     |
| the staged copy | the bytes of all weights, as the kernels use them   | `stage`, until `unstage`         |
| the checkpoint  | tensors, which are read and packed again            | it must be the one of the start  |

The staged copy is host memory of its own, and never changes: going to sleep copies nothing.

The memory of the weights is copied and verified in pieces, by all cores. The checksum of each piece was made when the
weights were loaded; `restore` compares it with what is in place afterwards. A staged copy is copied and verified in one
pass, 2 MiB at a time: that takes little longer than a plain copy.
"""

import ctypes
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
import xxhash

from cpd.common.errors import CheckpointError, ConfigError
from engine.execution.cpu import system_memory
from engine.execution.cpu.lanes import use_threads
from engine.execution.cpu.system_memory import Bytes
from engine.execution.memory_limits import available_memory

Item = TypeVar("Item")
Result = TypeVar("Result")

ReadAgain = Callable[[], Generator[tuple[torch.Tensor, torch.Tensor], None, None]]
"""Yields each weight with a new tensor of the same content, from the checkpoint. Raises CheckpointError."""

PIECE_BYTES = system_memory.HUGE_PAGE_BYTES
"""If two cores write into one new huge page, both fill it with zeros first."""

CACHED_BYTES = 512 << 10
"""Bytes that are still in the core's cache when their checksum is computed."""

_RANGE_BYTES = 32 << 20
"""Memory that is released or populated in one call."""

_ALIGNMENT = 64
"""At which tensors begin, in bytes; torch aligns its tensors alike."""


class ModelMemory:
    """See the module. For one thread at a time. Only `stage`, `unstage` and `populate_pool` may run beside steps.

    Args:
        weights: All tensors of the model. They are moved, and their checksums are computed now.
        pool: The page pool. Its content is lost when it is released.
        read_again: Reads the weights again, with the caller's threads.
        source: The checkpoint, for messages.

    Attributes:
        num_bytes: Size of weights and pool.
        weight_bytes: Size of the weights.
    """

    def __init__(self, weights: Iterable[torch.Tensor], pool: torch.Tensor, read_again: ReadAgain, source: str) -> None:
        self._weights = _gather(weights)
        system_memory.trim()  # loading leaves much
        self._pool = _bytes_of(pool)
        self._read_again = read_again
        self._source = source
        self._cores = _Cores(torch.get_num_threads())
        self._released = False
        self._staged: Bytes | None = None
        self.weight_bytes = len(self._weights)
        self.num_bytes = self.weight_bytes + len(self._pool)
        self._ranges = [part for memory in (self._weights, self._pool) for part in _ranges(memory)]
        self._checksums = self._checksums_of(self._weights)

    @property
    def staged_bytes(self) -> int:
        """Size of the staged copy; 0 if there is none."""
        return len(self._staged) if self._staged is not None else 0

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
                self._read_into(self._weights)
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
            staged = system_memory.shared(self.weight_bytes)
            for part in _ranges(staged):
                system_memory.populate(part)
        except OSError as error:
            raise ConfigError(f"the system gave no memory for a staged copy: {error.strerror}") from None
        if self._released:
            self._read_into(staged)
        else:
            for target, source in zip(_ranges(staged), _ranges(self._weights), strict=True):
                target[:] = source
        self._staged = staged

    def unstage(self) -> None:
        """Drops the staged copy, if there is one."""
        staged, self._staged = self._staged, None
        if staged is not None:
            for part in _ranges(staged):  # unmapping it would free it, too, but keeps the GIL meanwhile
                system_memory.release_shared(part)

    def _copy_staged(self, staged: Bytes) -> None:
        pieces = list(zip(_divide(self._weights, PIECE_BYTES), _divide(staged, PIECE_BYTES), strict=True))
        if self._cores.map(_copy, pieces) != self._checksums:
            self.unstage()
            raise CheckpointError("the staged copy of the weights is damaged; the next wake reads the checkpoint")

    def _read_into(self, memory: Bytes) -> None:
        """Reads the weights again, into memory like theirs."""

        def copy(one: tuple[Bytes, Bytes]) -> None:
            target, source = one
            target[:] = source

        use_threads(self._cores.count)  # as at the start: then computed tables have the same bits
        with closing(self._read_again()) as weights:
            for own, fresh in weights:
                start = own.data_ptr() - _address(self._weights)
                target = memory[start : start + own.nbytes]
                parts = zip(_divide(target, PIECE_BYTES), _divide(_bytes_of(fresh), PIECE_BYTES), strict=True)
                self._cores.map(copy, list(parts))
        system_memory.trim()
        if self._checksums_of(memory) != self._checksums:
            raise CheckpointError(f"{self._source} does not hold the weights that the worker started with")

    def _checksums_of(self, memory: Bytes) -> list[int]:
        return self._cores.map(_checksum, _divide(memory, PIECE_BYTES))


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


def _gather(tensors: Iterable[torch.Tensor]) -> Bytes:
    """Moves tensors into one memory. Returns it."""
    at: dict[int, list[torch.Tensor]] = {}  # one may be used twice
    for tensor in tensors:
        at.setdefault(tensor.data_ptr(), []).append(tensor)
    sizes = [-(-same[0].nbytes // _ALIGNMENT) * _ALIGNMENT for same in at.values()]
    memory = system_memory.own(sum(sizes))
    for same, start in zip(at.values(), accumulate(sizes, initial=0), strict=False):
        old = _bytes_of(same[0])
        place = memory[start : start + len(old)]
        place[:] = old
        system_memory.release(old)  # what is freed is not always given back to the system
        with torch.inference_mode():
            for tensor in same:
                tensor.set_(torch.from_numpy(place).untyped_storage(), 0, tensor.shape, tensor.stride())
    return memory


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """A view of a contiguous tensor's memory, which does not keep the tensor."""
    assert tensor.is_contiguous()
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))


def _divide(memory: Bytes, size: int) -> list[Bytes]:
    return [memory[start : start + size] for start in range(0, len(memory), size)]


def _ranges(memory: Bytes) -> list[Bytes]:
    return _divide(memory, _RANGE_BYTES)


def _address(memory: Bytes) -> int:
    return memory.ctypes.data


def _checksum(memory: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(memory.data)


def _copy(one: tuple[Bytes, Bytes]) -> int:
    """Copies to the first from the second. Returns the checksum of the first."""
    checksum = xxhash.xxh3_64()
    for target, source in zip(*(_divide(memory, CACHED_BYTES) for memory in one), strict=True):
        target[:] = source
        checksum.update(target.data)
    return checksum.intdigest()
