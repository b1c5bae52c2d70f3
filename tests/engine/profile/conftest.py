from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Restores torch's threads: loading a model for a profile uses all cores."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
