"""Disjoint parts of a GPU's SMs, each a CUDA Green Context with one stream.

    GreenContexts          owns all of it, and takes it down in reverse order
      PartitionPair        one a prepared split: all SMs, in two parts that share none
        Partition          prefill
        Partition          decode

One of the two parts is split off, in whole steps of the device; the other one is what remains, whatever its size. The
parts of different pairs overlap, so that only one pair may be in use at a time. What runs on a partition's stream stays
within its SMs, also from a CUDA graph that was captured on it. L2 cache and memory bandwidth are not divided.
"""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from cpd.common.errors import CPDError
from cpd.performance.split import Device, lane_splits
from engine.execution.cuda.driver import CudaError, CudaUnavailableError, Driver, SmResource

log = logging.getLogger(__name__)

_FIRST_VERSION = 12040
_CLUSTER_CAPABILITY = 9
_REFUSED = ("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "CUDA_ERROR_INVALID_VALUE")
"""What a driver says to a part that it does not make: chips with as many SMs differ in which are neighbours."""
_MAX_CLUSTER = 8
"""Blocks of the largest thread-block cluster that a kernel may count on (CUDA programming guide)."""


class UnusablePartitionError(CPDError):
    """A split that the driver does not make as asked, or not so that every kernel can run on both parts."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of the SMs. It is gone when its `GreenContexts` is closed: whoever uses the stream keeps that alive.

    Attributes:
        device: Index of the GPU.
        sms: How many.
        handle: Of the stream.
    """

    device: int
    sms: int
    handle: int

    def stream(self) -> torch.cuda.ExternalStream:
        """The stream for torch."""
        device = torch.device("cuda", self.device)
        return torch.cuda.ExternalStream(self.handle, device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class PartitionPair:
    """Two parts that share no SM and together are the whole device."""

    prefill: Partition
    decode: Partition


class GreenContexts:
    """Makes partitions of one GPU, and owns them. Not thread-safe.

    Attributes:
        units: What parts there can be.

    Raises:
        CudaUnavailableError: This GPU can't be divided; says why. Prefills and decodes then share batches.
    """

    def __init__(self, driver: Driver, device: int = 0) -> None:
        version = driver.version()
        if version < _FIRST_VERSION:
            spoken = f"{version // 1000}.{version % 1000 // 10}"
            raise CudaUnavailableError(
                f"the SMs can't be divided: Green Contexts need a driver for CUDA 12.4, and this one is for {spoken}: "
                "update the NVIDIA driver"
            )
        try:
            self._major, _ = driver.compute_capability(device)
            self._resource = driver.sm_resource(device)
        except CudaError as error:
            raise CudaUnavailableError(f"the SMs of GPU {device} can't be divided: {error}") from error
        sms = self._resource.sms
        minimum, step = _granularity(self._resource, self._major)
        if sms < 2 * minimum:
            raise CudaUnavailableError(f"GPU {device} has {sms} SMs, too few for two parts of {minimum}")
        self.units = Device(sms, step=step, minimum=minimum)
        self._driver = driver
        self._device = device
        self._owned = ExitStack()

    def prepare(self, decode_shares: Iterable[float]) -> list[PartitionPair]:
        """Opens a pair for each share of the device that decodes may want, as near to it as there are parts. If that
        fails, nothing of it is left.

        Returns:
            From the smallest part for decodes to the largest, without those that are of no use, which are logged.

        Raises:
            CudaError: The driver refuses.
        """
        sizes = [int(split.decode) for split in lane_splits(self.units)]
        nearest = {min(sizes, key=lambda size: abs(size - share * self.units.units)) for share in decode_shares}
        pairs = []
        with ExitStack() as opened:
            for size in sorted(nearest):
                try:
                    pairs.append(self._open(size, opened))
                except UnusablePartitionError as error:
                    log.warning("no lanes with %d of %d SMs for decodes: %s", size, self.units.units, error)
            self._owned.callback(opened.pop_all().close)
        return pairs

    def open(self, decode_sms: int) -> PartitionPair:
        """Divides the device in two. If that fails, nothing of it is left, and what was opened before stays.

        Args:
            decode_sms: For the decodes; the rest is for prefills. See `cpd.performance.split.lane_splits`.

        Raises:
            ValueError: No such parts exist, see `units`.
            UnusablePartitionError: The driver makes other parts, or some kernels could not run on one of them.
            CudaError: The driver refuses.
        """
        return self._open(decode_sms, self._owned)

    def close(self) -> None:
        """Waits for what runs on the streams, and takes everything down, the last first. A second call does nothing.

        CUDA graphs and tensors that belong to the streams must be gone before.

        Raises:
            CudaError: Something failed, such as an earlier kernel. The rest is taken down nevertheless.
        """
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, decode_sms: int, owner: ExitStack) -> PartitionPair:
        """See `open`. `owner` takes it down."""
        units, step, minimum = self.units.units, self.units.step, self.units.minimum
        prefill_sms = units - decode_sms
        if min(prefill_sms, decode_sms) < minimum or (prefill_sms % step and decode_sms % step):
            raise ValueError(
                f"{units} SMs have no parts of {prefill_sms} and {decode_sms}: at least {minimum}, and one of them a "
                f"multiple of {step}"
            )
        asked = prefill_sms if decode_sms % step else decode_sms
        try:
            group, rest = self._driver.split(self._resource, asked)
        except CudaError as error:
            if error.code in _REFUSED:
                raise UnusablePartitionError(
                    f"the driver splits off no {asked} of {units} SMs ({error.code})"
                ) from error
            raise
        if (group.sms, rest.sms) != (asked, units - asked):
            raise UnusablePartitionError(
                f"the driver splits off {group.sms} of {units} SMs and leaves {rest.sms} where {asked} were asked for"
            )
        prefill, decode = (group, rest) if decode_sms % step else (rest, group)
        with ExitStack() as opened:
            pair = PartitionPair(self._partition(prefill, opened), self._partition(decode, opened))
            owner.callback(opened.pop_all().close)
        return pair

    def _partition(self, resource: SmResource, opened: ExitStack) -> Partition:
        """A partition of these SMs, which `opened` takes down."""
        context = self._driver.create_context(self._device, resource)
        opened.callback(self._driver.destroy_context, context)
        stream = self._driver.create_stream(context)
        opened.callback(self._driver.destroy_stream, stream)
        opened.callback(self._driver.synchronize, stream)
        if self._major >= _CLUSTER_CAPABILITY:
            self._check_clusters(stream, resource.sms)
        return Partition(self._device, resource.sms, stream)

    def _check_clusters(self, stream: int, sms: int) -> None:
        """The blocks of a cluster must be on neighbouring SMs, which the remainder of a split need not have: there a
        kernel with clusters, as cuBLAS has for Hopper, would fail at its launch."""
        try:
            clusters = self._driver.max_clusters(stream, _MAX_CLUSTER)
        except (CudaError, CudaUnavailableError) as error:
            log.warning("whether clusters of thread blocks run on %d SMs is not known: %s", sms, error)
            return
        if clusters == 0:
            raise UnusablePartitionError(
                f"{sms} SMs without {_MAX_CLUSTER} neighbours hold no cluster of thread blocks"
            )


def _granularity(resource: SmResource, major: int) -> tuple[int, int]:
    """SMs of the smallest part, and what parts are multiples of: as the driver says, or else by NVIDIA's guideline."""
    minimum, step = (8, 8) if major >= _CLUSTER_CAPABILITY else (4, 2) if major == 8 else (2, 2)
    return resource.minimum or minimum, resource.step or step
