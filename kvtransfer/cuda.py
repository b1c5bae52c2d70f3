"""The calls of the CUDA runtime that are needed for pages in a GPU's memory.

They block without the GIL, and work beside torch, with which they share the device's one context.
"""

import ctypes
from typing import Any

from cpd.common.errors import TransferError


def use(device: int) -> None:
    """Makes a device the calling thread's, as NIXL's calls for its memory expect it.

    Raises:
        TransferError: There is no such device, or no package for it; so do all calls here.
    """
    _call("cudaSetDevice", device)


def count() -> int:
    """How many devices this process may use."""
    (devices,) = _call("cudaGetDeviceCount")
    return int(devices)


def allocate(device: int, num_bytes: int) -> int:
    """Memory of a device that other processes can be let into. Give it to `free`."""
    use(device)
    (pointer,) = _call("cudaMalloc", num_bytes)
    return int(pointer)


def free(device: int, pointer: int) -> None:
    """Gives back what `allocate` gave."""
    use(device)
    _call("cudaFree", pointer)


def fill(device: int, pointer: int, value: int, num_bytes: int) -> None:
    """Sets every byte. Returns when that is done."""
    use(device)
    _call("cudaMemset", pointer, value, num_bytes)
    wait(device)


def wait(device: int) -> None:
    """Returns when everything is done that this process has begun on the device."""
    use(device)
    _call("cudaDeviceSynchronize")


def read(device: int, pointer: int, num_bytes: int) -> bytearray:
    """A copy of device memory. It waits for no kernel, and none waits for it."""
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
