"""The CUDA runtime calls that pages in GPU memory need.

They block without the GIL, and share the device's primary context with torch. All of them raise TransferError if there
is no such device, or cuda-python is not installed.
"""

import ctypes
from typing import Any

from cpd.common.errors import TransferError


def use(device: int) -> None:
    """Makes a device current on the calling thread, which NIXL's calls for its memory require."""
    _call("cudaSetDevice", device)


def count() -> int:
    """Number of devices this process may use."""
    (devices,) = _call("cudaGetDeviceCount")
    return int(devices)


def allocate(device: int, num_bytes: int) -> int:
    """Allocates device memory that other processes can map. Release it with `free`."""
    use(device)
    (pointer,) = _call("cudaMalloc", num_bytes)
    return int(pointer)


def free(device: int, pointer: int) -> None:
    """Releases memory of `allocate`."""
    use(device)
    _call("cudaFree", pointer)


def fill(device: int, pointer: int, value: int, num_bytes: int) -> None:
    """Sets every byte, and waits until that is done."""
    use(device)
    _call("cudaMemset", pointer, value, num_bytes)
    wait(device)


def wait(device: int) -> None:
    """Waits for everything that this process has started on the device."""
    use(device)
    _call("cudaDeviceSynchronize")


def read(device: int, pointer: int, num_bytes: int) -> bytearray:
    """Copies device memory to the host, without waiting for kernels or delaying them."""
    use(device)
    copy = bytearray(num_bytes)
    target = ctypes.addressof(ctypes.c_char.from_buffer(copy))
    runtime = _runtime()
    (stream,) = _call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
    try:
        _call("cudaMemcpyAsync", target, pointer, num_bytes, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, stream)
        _call("cudaStreamSynchronize", stream)
    finally:
        _call("cudaStreamDestroy", stream)
    return copy


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise TransferError(f"pages in a GPU's memory need cuda-python ({error}): pip install cuda-python") from None
    return runtime


def _call(name: str, *arguments: Any) -> tuple[Any, ...]:
    runtime = _runtime()
    code, *results = getattr(runtime, name)(*arguments)
    if code != runtime.cudaError_t.cudaSuccess:
        raise TransferError(f"{name} failed with {code.name}; see whether `nvidia-smi` shows the GPU and its memory")
    return tuple(results)
