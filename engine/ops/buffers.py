"""Small inputs on their way to a device: from pinned memory, without waiting for it.

A copy out of ordinary memory makes the host wait until everything before it on the stream has run. Pinned blocks come
from torch's caching allocator, which gives one away again only when the copy out of it is done.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import IntArray

_ALIGN = 16
"""Numbers to which an array in a packed buffer is aligned, 64 bytes: kernels are compiled for pointers' alignment, and
each other one would be compiled in the middle of serving."""


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, ordered after what its current stream has to do. On a CPU the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def packed_size(lengths: Sequence[int]) -> int:
    """Numbers of a buffer that `pack` fills with arrays of these lengths."""
    return sum(_aligned(length) for length in lengths)


def pack(arrays: Sequence[IntArray], device: torch.device, into: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Arrays on a device, by one copy. On a CPU they are views.

    Args:
        into: int32 buffer on the device to use; the results of equal lengths then have equal addresses.

    Returns:
        int32 tensors of the arrays' shapes.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(np.ascontiguousarray(array, np.int32)) for array in arrays]
    size = packed_size([array.size for array in arrays])
    staging = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers, start, spans = staging.numpy(), 0, []
    for array in arrays:
        numbers[start : start + array.size] = array.ravel()
        spans.append(start)
        start += _aligned(array.size)
    if into is None:
        buffer = staging.to(device, non_blocking=True)
    else:
        buffer = into[:size]
        buffer.copy_(staging, non_blocking=True)
    return [buffer[start : start + array.size].view(array.shape) for start, array in zip(spans, arrays, strict=True)]


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN
