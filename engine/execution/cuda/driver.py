"""Calls of the CUDA driver that torch does not offer: SM resources, Green Contexts and their streams.

Code above the protocol `Driver` runs against a fake on machines without a GPU. See "Green Contexts" in NVIDIA's driver
API reference.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

from cpd.common.errors import CPDError

_PROBE_THREADS = 1024
_PROBE = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry probe() { ret; }
"""

_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "there is no GPU that this process may use; check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory on the GPU, or lower --kv-memory",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or its driver does not support it; use --colocate mixed",
    "CUDA_ERROR_INVALID_CONTEXT": "use torch on the GPU on this thread first, such as torch.cuda.synchronize()",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel failed and the process must be restarted; CUDA_LAUNCH_BLOCKING=1 "
    "shows which",
}
_GENERAL_ADVICE = "use --colocate mixed to run without Green Contexts"


class CudaUnavailableError(CPDError):
    """The driver, the device or its Python package is missing or too old."""


class CudaError(CPDError):
    """A call of the driver failed.

    Attributes:
        call: Function, such as cuGreenCtxCreate.
        code: Error, such as CUDA_ERROR_OUT_OF_MEMORY.
    """

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call} failed with {code}: {_ADVICE.get(code, _GENERAL_ADVICE)}")
        self.call = call
        self.code = code


@dataclass(frozen=True, slots=True)
class SmResource:
    """SMs from which a Green Context can be made.

    Attributes:
        handle: The driver's handle.
        sms: Number of SMs.
        minimum: Fewest SMs of a partition; 0 if the driver does not report it.
        step: Partitions are multiples of this; 0 if the driver does not report it.
    """

    handle: Any
    sms: int
    minimum: int
    step: int


class Driver(Protocol):
    """The driver calls in use. Call them on a thread that has used torch on the device.

    Every call raises `CudaError` if it fails, and `CudaUnavailableError` if the driver or the call is missing.
    Contexts are opaque; streams are handles for torch.
    """

    def version(self) -> int:
        """Returns the driver's CUDA version: 1000 x major + 10 x minor."""

    def compute_capability(self, device: int) -> tuple[int, int]:
        """Returns major and minor."""

    def sm_resource(self, device: int) -> SmResource:
        """Returns all SMs of a device."""

    def split(self, resource: SmResource, sms: int) -> tuple[SmResource, SmResource]:
        """Splits a device's SMs into a part of at least `sms`, and the rest."""

    def create_context(self, device: int, resource: SmResource) -> Any:
        """Creates a Green Context of these SMs."""

    def destroy_context(self, context: Any) -> None:
        """Destroys a context, after its streams."""

    def create_stream(self, context: Any) -> int:
        """Creates a stream whose kernels stay on the context's SMs. It does not wait for the default stream."""

    def synchronize(self, stream: int) -> None:
        """Waits until the stream is idle."""

    def destroy_stream(self, stream: int) -> None:
        """Destroys an idle stream."""

    def max_clusters(self, stream: int, blocks: int) -> int:
        """Returns how many thread-block clusters, with this many blocks of 1,024 threads, can run at once on a stream's
        SMs. Needs compute capability 9.0."""


class CudaDriver:
    """The real driver, through the package cuda-bindings. See `Driver`.

    Raises:
        CudaUnavailableError: The package is missing.
        CudaError, CudaUnavailableError: The driver cannot be initialised.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CudaUnavailableError(
                f"the Python package cuda-bindings is missing ({error}): install CPD with its extra `gpu`"
            ) from error
        self._cuda = driver
        self._call("cuInit", 0)

    def version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def compute_capability(self, device: int) -> tuple[int, int]:
        handle = self._call("cuDeviceGet", device)
        attribute = self._cuda.CUdevice_attribute
        major, minor = (
            int(self._call("cuDeviceGetAttribute", key, handle))
            for key in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return major, minor

    def sm_resource(self, device: int) -> SmResource:
        handle = self._call("cuDeviceGet", device)
        kind = self._cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return _resource(self._call("cuDeviceGetDevResource", handle, kind))

    def split(self, resource: SmResource, sms: int) -> tuple[SmResource, SmResource]:
        groups, count, rest = self._call("cuDevSmResourceSplitByCount", 1, resource.handle, 0, sms)
        if count != 1:  # the driver rounds up to more SMs than there are
            raise CudaError("cuDevSmResourceSplitByCount", "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
        return _resource(groups[0]), _resource(rest)

    def create_context(self, device: int, resource: SmResource) -> Any:
        description = self._call("cuDevResourceGenerateDesc", [resource.handle], 1)
        flags = self._cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return self._call("cuGreenCtxCreate", description, self._call("cuDeviceGet", device), int(flags))

    def destroy_context(self, context: Any) -> None:
        self._call("cuGreenCtxDestroy", context)

    def create_stream(self, context: Any) -> int:
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuGreenCtxStreamCreate", context, int(flags), 0))

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", self._cuda.CUstream(stream))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", self._cuda.CUstream(stream))

    def max_clusters(self, stream: int, blocks: int) -> int:
        cuda = self._cuda
        dimension = cuda.CUlaunchAttribute()
        dimension.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension.value.clusterDim.x, dimension.value.clusterDim.y, dimension.value.clusterDim.z = blocks, 1, 1
        launch = cuda.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = _PROBE_THREADS, 1, 1
        launch.hStream = cuda.CUstream(stream)
        launch.attrs, launch.numAttrs = [dimension], 1
        code = ctypes.create_string_buffer(_PROBE)  # ends with NUL, as PTX requires
        library = self._call("cuLibraryLoadData", ctypes.addressof(code), [], [], 0, [], [], 0)
        try:
            kernel = self._call("cuLibraryGetKernel", library, b"probe")
            return int(self._call("cuOccupancyMaxActiveClusters", cuda.CUfunction(int(kernel)), launch))
        finally:
            self._call("cuLibraryUnload", library)

    def _call(self, name: str, *args: Any) -> Any:
        """Calls a driver function. Returns its results after the status: nothing, one value, or several."""
        try:
            status, *values = getattr(self._cuda, name)(*args)
        except (AttributeError, RuntimeError) as error:  # the package or the driver does not have this call
            raise CudaUnavailableError(
                f"{name} is missing ({error}): update the NVIDIA driver and the package cuda-bindings"
            ) from error
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(name, getattr(status, "name", str(status)))
        return values[0] if len(values) == 1 else tuple(values)


def _resource(handle: Any) -> SmResource:
    sm = handle.sm
    minimum, step = (getattr(sm, name, 0) for name in ("minSmPartitionSize", "smCoscheduledAlignment"))  # since CUDA 13
    return SmResource(handle, sm.smCount, minimum, step)
