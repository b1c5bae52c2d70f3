"""A fake `engine.execution.cuda.driver.Driver` that tracks the owner of each SM."""

import math
from typing import Any

from engine.execution.cuda.driver import CudaError, SmResource


class FakeDriver:
    """Hands out SMs by number, and refuses invalid calls.

    Attributes:
        contexts: SMs of each live context.
        streams: Context of each live stream.
        calls: Names of the calls so far.
        fail_at: Which call fails, counted from 0. A teardown call that fails has done its work.
        no_clusters_on: A part of this many SMs has no clusters.
        most: Maximum number of SMs that can be split off.
    """

    def __init__(
        self,
        sms: int = 132,
        step: int = 8,
        minimum: int = 8,
        *,
        version: int = 13000,
        major: int = 9,
        rounds: bool = False,
    ) -> None:
        self.contexts: dict[int, frozenset[int]] = {}
        self.streams: dict[int, int] = {}
        self.calls: list[str] = []
        self.fail_at = math.inf
        self.no_clusters_on: int | None = None
        self.most = sms
        self._all = frozenset(range(sms))
        self._step, self._minimum = step, minimum
        self._version, self._major, self._rounds = version, major, rounds
        self._idle: set[int] = set()
        self._handles = iter(range(1000, 100_000))

    def sms_of(self, stream: int) -> frozenset[int]:
        """Returns the SMs on which a stream's kernels run."""
        return self.contexts[self.streams[stream]]

    def version(self) -> int:
        self._called("cuDriverGetVersion")
        return self._version

    def compute_capability(self, device: int) -> tuple[int, int]:
        self._called("cuDeviceGetAttribute")
        return self._major, 0

    def sm_resource(self, device: int) -> SmResource:
        self._called("cuDeviceGetDevResource")
        return self._resource(self._all)

    def split(self, resource: SmResource, sms: int) -> tuple[SmResource, SmResource]:
        self._called("cuDevSmResourceSplitByCount")
        assert resource.handle == self._all, "only a device's own resource can be split"
        if sms > self.most:
            raise CudaError("cuDevSmResourceSplitByCount", "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
        taken = sms + self._step if self._rounds else sms
        ids = sorted(self._all)
        return self._resource(frozenset(ids[:taken])), self._resource(frozenset(ids[taken:]))

    def create_context(self, device: int, resource: SmResource) -> Any:
        self._called("cuGreenCtxCreate")
        context = next(self._handles)
        self.contexts[context] = resource.handle
        return context

    def destroy_context(self, context: Any) -> None:
        assert context not in self.streams.values(), "a context is destroyed before its streams"
        del self.contexts[context]
        self._called("cuGreenCtxDestroy")

    def create_stream(self, context: Any) -> int:
        self._called("cuGreenCtxStreamCreate")
        stream = next(self._handles)
        self.streams[stream] = context
        return stream

    def synchronize(self, stream: int) -> None:
        assert stream in self.streams
        self._idle.add(stream)
        self._called("cuStreamSynchronize")

    def destroy_stream(self, stream: int) -> None:
        assert stream in self._idle, "a stream is destroyed while it may be in use"
        del self.streams[stream]
        self._called("cuStreamDestroy")

    def max_clusters(self, stream: int, blocks: int) -> int:
        self._called("cuOccupancyMaxActiveClusters")
        sms = len(self.sms_of(stream))
        return 0 if sms == self.no_clusters_on else 2 * sms // blocks

    def _resource(self, ids: frozenset[int]) -> SmResource:
        return SmResource(ids, len(ids), self._minimum, self._step)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")
