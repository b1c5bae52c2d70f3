"""Small inputs in one copy. Only a test on a GPU can show that it does not wait."""

import numpy as np
import torch

from engine.ops.buffers import upload, upload_arrays, upload_size

CPU = torch.device("cpu")


def test_arrays_share_a_buffer_at_aligned_addresses() -> None:
    buffer = torch.full((100,), -1, dtype=torch.int32)
    arrays = [np.arange(5, dtype=np.int32), np.zeros((2, 9), np.int32), np.array([7], np.int32)]
    tensors = upload_arrays(arrays, CPU, buffer)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.dtype == torch.int32
    starts = [(tensor.data_ptr() - buffer.data_ptr()) // 4 for tensor in tensors]
    assert starts == [0, 16, 48]
    assert upload_size([5, 18, 1]) == 64
    assert (buffer[64:] == -1).all()


def test_arrays_of_equal_lengths_have_equal_addresses() -> None:
    buffer = torch.zeros(64, dtype=torch.int32)
    first, second = (upload_arrays([np.full(n, value, np.int32) for n in (3, 17)], CPU, buffer) for value in (1, 2))
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert first[1].tolist() == [2] * 17


def test_a_cpu_needs_no_copy() -> None:
    array = np.arange(4, dtype=np.int32)
    (view,) = upload_arrays([array], CPU)
    array[0] = 9
    assert view[0] == 9
    tensor = torch.ones(2)
    assert upload(tensor, CPU) is tensor


def test_non_contiguous_arrays_are_copied_in_order() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2]
    assert upload_arrays([table], CPU, torch.zeros(16, dtype=torch.int32))[0].tolist() == table.tolist()
