from collections.abc import Iterator

import pytest
import torch

from engine.ops.cpu_ops import CpuOps


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps()


@pytest.fixture(params=[1, 2, 3], ids=["on1", "on2", "on3"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
