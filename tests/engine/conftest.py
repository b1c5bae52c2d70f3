import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Limits torch to one thread: the tests' models are too small to gain from more."""
    torch.set_num_threads(1)
