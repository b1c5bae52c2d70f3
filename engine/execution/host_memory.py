"""Host memory for pages that are evicted from a pool in a torch tensor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
import xxhash

from engine.execution.cpu.lanes import use_threads

_TIMED_BYTES = 64 << 20
_RUNS = 5


class TorchHostMemory(ABC):
    """See `engine.kv.host_tier.HostMemory`. Copies to the pool run on one thread, one after the other.

    Args:
        pool: [pages, ...]
        slots: Host memory. [slots, ...]
        checksums: True to store a checksum of each slot, and to verify it before the slot is used.

    Attributes:
        slot_ms: Time to copy one slot to the pool: the fastest of the copies timed at the start, which overwrite the
            pool's first pages.
    """

    def __init__(self, pool: torch.Tensor, slots: torch.Tensor, *, checksums: bool) -> None:
        self.num_slots = len(slots)
        self._pool, self._slots = pool, slots
        self._bytes = slots.view(torch.uint8).flatten(1).numpy()
        self._sums = [0] * len(slots) if checksums else None
        # Copies use one core; the others compute.
        self._executor = ThreadPoolExecutor(1, "host-copies", initializer=use_threads, initargs=(1,))
        self.slot_ms = self._executor.submit(self._time).result()

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """See `engine.kv.host_tier.HostMemory`. With checksums it waits for the copies."""
        self._out(pages, slots)
        if self._sums is not None:
            self._settle()
            for slot in slots:
                self._sums[slot] = self._sum(slot)

    def copy_back(self, slots: Sequence[int], pages: Sequence[int], on_done: Callable[[], None]) -> Future[int]:
        """See `engine.kv.host_tier.HostMemory`."""
        copy = self._executor.submit(self._copy_back, slots, pages)
        copy.add_done_callback(lambda _: on_done())
        return copy

    @abstractmethod
    def _settle(self) -> None:
        """Waits until all copies to host memory are complete."""

    @abstractmethod
    def _out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Starts copying pages to slots; see `copy_out`."""

    @abstractmethod
    def _back(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages and waits for completion. Runs on the copies' own thread."""

    def _copy_back(self, slots: Sequence[int], pages: Sequence[int]) -> int:
        good = len(slots)
        if self._sums is not None:
            self._settle()
            good = next((index for index, slot in enumerate(slots) if self._sum(slot) != self._sums[slot]), good)
        self._back(slots[:good], pages[:good])
        return good

    def _sum(self, slot: int) -> int:
        return xxhash.xxh3_64_intdigest(self._bytes[slot])

    def _time(self) -> float:
        count: int = max(1, min(self.num_slots, len(self._pool), _TIMED_BYTES // self._bytes.shape[1]))
        times: list[float] = []
        for _ in range(_RUNS):
            start_s = perf_counter()
            self._back(range(count), range(count))
            times.append(perf_counter() - start_s)
        return 1e3 * min(times) / count


class CpuHostMemory(TorchHostMemory):
    """Host memory for a pool that is in host memory, too."""

    def _settle(self) -> None:
        """Returns at once: copies are synchronous."""

    def _out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        for page, slot in zip(pages, slots, strict=True):
            self._slots[slot].copy_(self._pool[page])

    def _back(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._pool[page].copy_(self._slots[slot])
