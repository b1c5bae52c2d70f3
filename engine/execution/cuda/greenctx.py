"""Disjoint partitions of a GPU's SMs, each a CUDA Green Context with one stream.

    GreenContexts          owns everything, and destroys it in reverse order
      PartitionPair        for each prepared split: all SMs, in two disjoint partitions
        Partition          prefill
        Partition          decode

The size of one partition is a multiple of the device's step; the other one is the remainder. Partitions of different
pairs overlap, so that only one pair may be in use at a time. Kernels on a partition's stream stay on its SMs, and so do
CUDA graphs captured on that stream. L2 cache and memory bandwidth are not divided.
"""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import torch

from cpd.common.errors import CPDError
from cpd.performance.split import Device, lane_splits
from engine.execution.cuda.driver import CudaError, CudaUnavailableError, Driver, SmResource

log = logging.getLogger(__name__)

_FIRST_VERSION = 12040
_CLUSTER_CAPABILITY = 9
_REFUSED = ("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "CUDA_ERROR_INVALID_VALUE")
"""Errors for a partition that the driver can't make. Chips with equal numbers of SMs differ in which are adjacent."""
_MAX_CLUSTER = 8
"""Blocks of the largest portable thread-block cluster (CUDA programming guide)."""


class UnusablePartitionError(CPDError):
    """The driver can't make a split, or some kernels could not run on one of its partitions."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Some of the SMs, with a stream. Users of the stream must keep its `GreenContexts` open.

    Attributes:
        device: Index of the GPU.
        sms: Number of SMs.
        handle: Handle of the stream.
    """

    device: int
    sms: int
    handle: int

    def stream(self) -> torch.cuda.ExternalStream:
        """Returns the stream for torch."""
        device = torch.device("cuda", self.device)
        return torch.cuda.ExternalStream(self.handle, device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class PartitionPair:
    """Two disjoint partitions that together are the whole device."""

    prefill: Partition
    decode: Partition


class GreenContexts:
    """Makes partitions of one GPU, and owns them. Not thread-safe.

    Attributes:
        units: Possible sizes of partitions.

    Raises:
        CudaUnavailableError: This GPU can't be partitioned; the message says why.
    """

    def __init__(self, driver: Driver, device: int = 0) -> None:
        version = driver.version()
        if version < _FIRST_VERSION:
            spoken = f"{version // 1000}.{version % 1000 // 10}"
            raise CudaUnavailableError(
                f"the SMs can't be partitioned: Green Contexts need a driver for CUDA 12.4, and this one is for "
                f"{spoken}: update the NVIDIA driver"
            )
        try:
            self._major, _ = driver.compute_capability(device)
            self._resource = driver.sm_resource(device)
        except CudaError as error:
            raise CudaUnavailableError(f"the SMs of GPU {device} can't be partitioned: {error}") from error
        sms = self._resource.sms
        minimum, step = _granularity(self._resource, self._major)
        if sms < 2 * minimum:
            raise CudaUnavailableError(f"GPU {device} has {sms} SMs, too few for two partitions of {minimum}")
        self.units = Device(sms, step=step, minimum=minimum)
        self._driver = driver
        self._device = device
        self._owned = ExitStack()

    def prepare(self, decode_shares: Iterable[float]) -> list[PartitionPair]:
        """Opens a pair for each decode share of the device, as close to it as possible. Opens none if it fails.

        Returns:
            Pairs from the smallest decode partition to the largest, without unusable ones, which are logged.

        Raises:
            CudaError: A call of the driver failed.
        """
        sizes = [int(split.decode) for split in lane_splits(self.units)]
        nearest = {min(sizes, key=lambda size: abs(size - share * self.units.units)) for share in decode_shares}
        pairs = []
        with ExitStack() as opened:
            for size in sorted(nearest):
                try:
                    pairs.append(self.open(size, opened))
                except UnusablePartitionError as error:
                    log.warning("no lanes with %d of %d SMs for decodes: %s", size, self.units.units, error)
            self._owned.callback(opened.pop_all().close)
        return pairs

    def open(self, decode_sms: int, owner: ExitStack | None = None) -> PartitionPair:
        """Divides the device in two. If it fails, nothing new is open, and earlier pairs stay.

        Args:
            decode_sms: SMs for decodes; the rest is for prefills. See `cpd.performance.split.lane_splits`.
            owner: Destroys the pair; None for `close`.

        Raises:
            ValueError: There are no partitions of these sizes; see `units`.
            UnusablePartitionError: The driver makes other sizes, or some kernels could not run on one partition.
            CudaError: A call of the driver failed.
        """
        units, step, minimum = self.units.units, self.units.step, self.units.minimum
        prefill_sms = units - decode_sms
        if min(prefill_sms, decode_sms) < minimum or (prefill_sms % step and decode_sms % step):
            raise ValueError(
                f"{units} SMs can't be partitioned into {prefill_sms} and {decode_sms}: each needs at least {minimum}, "
                f"and one must be a multiple of {step}"
            )
        asked = prefill_sms if decode_sms % step else decode_sms
        try:
            group, rest = self._driver.split(self._resource, asked)
        except CudaError as error:
            if error.code in _REFUSED:
                raise UnusablePartitionError(
                    f"the driver can't split off {asked} of {units} SMs ({error.code})"
                ) from error
            raise
        if (group.sms, rest.sms) != (asked, units - asked):
            raise UnusablePartitionError(
                f"the driver splits off {group.sms} of {units} SMs and leaves {rest.sms}; requested were {asked}"
            )
        prefill, decode = (group, rest) if decode_sms % step else (rest, group)
        with ExitStack() as opened:
            pair = PartitionPair(self._partition(prefill, opened), self._partition(decode, opened))
            (owner or self._owned).callback(opened.pop_all().close)
        return pair

    def close(self) -> None:
        """Waits for the streams and destroys everything in reverse order. A second call does nothing.

        Delete CUDA graphs and tensors of the streams first.

        Raises:
            CudaError: A call failed, such as an earlier kernel. The rest is destroyed nevertheless.
        """
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _partition(self, resource: SmResource, opened: ExitStack) -> Partition:
        """Makes a partition of these SMs, which `opened` destroys."""
        context = self._driver.create_context(self._device, resource)
        opened.callback(self._driver.destroy_context, context)
        stream = self._driver.create_stream(context)
        opened.callback(self._driver.destroy_stream, stream)
        opened.callback(self._driver.synchronize, stream)
        if self._major >= _CLUSTER_CAPABILITY:
            self._check_clusters(stream, resource.sms)
        return Partition(self._device, resource.sms, stream)

    def _check_clusters(self, stream: int, sms: int) -> None:
        """Raises `UnusablePartitionError` if no cluster of thread blocks fits.

        A cluster needs adjacent SMs, which a remainder may lack. Kernels with clusters, such as cuBLAS's for Hopper,
        would fail to launch there.
        """
        try:
            clusters = self._driver.max_clusters(stream, _MAX_CLUSTER)
        except (CudaError, CudaUnavailableError) as error:
            log.warning("can't check if clusters of thread blocks run on %d SMs: %s", sms, error)
            return
        if clusters == 0:
            raise UnusablePartitionError(f"{sms} SMs without {_MAX_CLUSTER} adjacent ones hold no thread-block cluster")


def _granularity(resource: SmResource, major: int) -> tuple[int, int]:
    """Returns the fewest SMs of a partition, and the step of its sizes: the driver's values or NVIDIA's guideline."""
    minimum, step = (8, 8) if major >= _CLUSTER_CAPABILITY else (4, 2) if major == 8 else (2, 2)
    return resource.minimum or minimum, resource.step or step
