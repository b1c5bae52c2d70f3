"""Copies small inputs to a device from pinned memory, without waiting.

A copy from pageable memory blocks the host until the stream has finished all earlier work. Pinned blocks come from
torch's caching allocator, which reuses a block only when the copy from it is complete.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import IntArray

_ALIGN = 16
"""Alignment of arrays in a shared buffer, in numbers (64 bytes). For another alignment Triton would compile its kernels
anew while serving."""


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to a device, in order with the current stream. On a CPU returns the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_indices(indices: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copies indices to a device, as `upload` does. int64, in the shape of `indices`"""
    return upload(torch.as_tensor(indices), device)


def take(rows: torch.Tensor, indices: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
    """Returns the rows with these ascending indices; the tensor itself if they are all of them."""
    return rows if len(indices) == len(rows) else rows[upload_indices(indices, rows.device)]


def upload_size(lengths: Sequence[int]) -> int:
    """Returns the size, in numbers, of a buffer into which `upload_arrays` puts arrays of these lengths."""
    return sum(_aligned(length) for length in lengths)


def upload_arrays(
    arrays: Sequence[IntArray], device: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Copies arrays to a device in one copy. On a CPU returns views.

    Args:
        into: int32 buffer on the device. Arrays of equal lengths get equal addresses in it.

    Returns:
        int32 tensors of the arrays' shapes.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array, np.int32)) for array in arrays]
    size = upload_size([array.size for array in arrays])
    staging = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers, start, starts = staging.numpy(), 0, []
    for array in arrays:
        numbers[start : start + array.size] = array.ravel()
        starts.append(start)
        start += _aligned(array.size)
    if into is None:
        buffer = staging.to(device, non_blocking=True)
    else:
        buffer = into[:size]
        buffer.copy_(staging, non_blocking=True)
    return [buffer[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN
