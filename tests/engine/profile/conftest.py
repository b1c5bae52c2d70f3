from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Loading a model to profile it takes all cores, as in a worker."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
