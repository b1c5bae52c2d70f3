"""Pinned host memory for pages that a GPU's pool evicts.

Pages are copied to the host on the stream of page copies (`engine/execution/cuda/lanes.py`): later steps wait for it on
the device, and the host never waits. They are copied back on a second stream: a thread starts the copies and sleeps
until they are complete.
"""

import weakref
from collections.abc import Sequence

import torch

from cpd.common.errors import ConfigError
from engine.execution.cuda.lanes import PageCopies
from engine.execution.host_memory import TorchHostMemory


def pin(memory: torch.Tensor) -> torch.Tensor:
    """Pins host memory in place until the tensor is deleted. torch's `pin_memory` would round 40 GiB up to 64.

    Raises:
        ConfigError: CUDA refuses; the message says why.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    status = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(status):
        raise ConfigError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory can't be pinned for the GPU: "
            f"{runtime.cudaGetErrorString(status)}; lower --host-kv-memory"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


class CudaHostMemory(TorchHostMemory):
    """See `engine.kv.host_tier.HostMemory`.

    Args:
        pool: Pool on the device. [pages, ...]
        slots: Pinned memory. [slots, ...]
        copies: Page copies of the same pool.
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
            self._stream.wait_event(self._copies.done)  # the pages' old content may still be copied out
            for slot, page in zip(slots, pages, strict=True):
                self._pool[page].copy_(self._slots[slot], non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()
