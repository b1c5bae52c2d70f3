"""Pinned host memory for the pages that a GPU's pool evicts.

Pages go out on the stream of page copies (`engine/execution/cuda/lanes.py`), for which every later step waits on the
device, and nobody on the host. They come back on a stream of their own: a thread starts the copies and sleeps until
they are done.
"""

from collections.abc import Sequence

import torch

from cpd.common.errors import ConfigError
from engine.execution.cuda.lanes import PageCopies
from engine.execution.host_memory import TorchHostMemory


def pin(memory: torch.Tensor) -> torch.Tensor:
    """Has the device copy from and to this host memory by itself. torch's `pin_memory` would take the next power of two
    of bytes: 64 GiB for 40.

    Raises:
        ConfigError: CUDA refuses; says why.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status):
        raise ConfigError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory can't be pinned for the GPU: "
            f"{runtime.cudaGetErrorString(status)}; lower --host-kv-memory"
        )
    return memory


class CudaHostMemory(TorchHostMemory):
    """See `engine.kv.host_tier.HostMemory`.

    Args:
        pool: On the device. [pages, ...]
        slots: Pinned. [slots, ...]
        copies: Of the same pool.
    """

    def __init__(self, pool: torch.Tensor, slots: torch.Tensor, copies: PageCopies, *, checksums: bool) -> None:
        self._copies = copies
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        super().__init__(pool, slots, checksums=checksums)

    def _settle(self) -> None:
        self._copies.settle()

    def _out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._copies.copy_out(pages, self._slots, slots)

    def _back(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._copies.done)  # what was in these pages may still be on its way out
            for slot, page in zip(slots, pages, strict=True):
                self._pool[page].copy_(self._slots[slot], non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()
