"""Host memory with a real page pool."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from cpd.common.blocks import extend_hashes, hash_root
from cpd.common.errors import ConfigError
from engine.execution.host_memory import CpuHostMemory
from engine.execution.runner import TorchRunner
from engine.model.config import load_config
from engine.types import Request, SamplingParams
from tests.conftest import MakeCheckpoint
from tests.engine.test_lanes_model import Arrival, serve

NUM_PAGES = 16
LONGEST = 200


class Counting(CpuHostMemory):
    """Counts the pages copied back."""

    returned = 0

    def copy_back(self, slots: Sequence[int], pages: Sequence[int], on_done: Callable[[], None]) -> Future[int]:
        self.returned += len(pages)
        return super().copy_back(slots, pages, on_done)


def random_pool(pages: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(pages, 2, 2, 1, 16, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_unchanged(dtype: torch.dtype) -> None:
    pool, done = random_pool(6, dtype), threading.Event()
    host = CpuHostMemory(pool, torch.zeros(4, *pool.shape[1:], dtype=dtype), checksums=True)
    assert host.slot_ms > 0
    pool.copy_(random_pool(6, dtype))  # used to time copies
    want = pool[[4, 1]].clone()
    host.copy_out([4, 1], [3, 0])
    pool.zero_()
    assert host.copy_back([3, 0], [2, 5], done.set).result(20) == 2
    assert done.wait(20)
    assert torch.equal(pool[[2, 5]], want)


@pytest.mark.parametrize(("checksums", "good"), [(True, 1), (False, 3)])
def test_checksums_find_a_damaged_slot(checksums: bool, good: int) -> None:
    pool = random_pool(3)
    slots = torch.zeros_like(pool)
    host = CpuHostMemory(pool, slots, checksums=checksums)
    pool.copy_(random_pool(3))
    host.copy_out([0, 1, 2], [0, 1, 2])
    pool.zero_()
    slots[1, 1, 0, 0, 3, 5] += 1
    assert host.copy_back([0, 1, 2], [0, 1, 2], lambda: None).result(20) == good
    assert torch.equal(pool[:good], slots[:good])
    assert not pool[good:].any()


@pytest.fixture(scope="module")
def directory(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("qwen3")


def make_runner(directory: Path, num_pages: int) -> TorchRunner:
    kv_bytes = num_pages * load_config(directory).page_bytes("float32")
    return TorchRunner(directory, dtype="float32", device="cpu", kv_bytes=kv_bytes, max_model_len=LONGEST)


def test_tokens_are_the_same_from_pages_that_came_back(directory: Path) -> None:
    """Prompts run one after the other, each needing most of the pool; then all again, together."""
    numbers, root = random.Random(3), hash_root(b"model")
    prompts = [numbers.choices(range(480), k=length) for length in (120, 150, 100, 180)]
    arrivals = []
    for number in range(12):
        tokens = prompts[number % 4]
        params = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=10, top_logprobs=2)
        request = Request(f"r{number}", tokens, len(tokens), params, root, extend_hashes(root, tokens))
        arrivals.append(Arrival(request, 50 * min(number, 8), -1, None))
    runner = make_runner(directory, NUM_PAGES)
    host = Counting(runner.pool, torch.zeros(80, *runner.pool.shape[1:]), checksums=True)
    want = serve(make_runner(directory, 200), "mixed", arrivals)
    got = serve(runner, "mixed", arrivals, host=host)
    for key, outputs in want.items():
        assert [output.token_ids for output in got[key]] == [output.token_ids for output in outputs]
        assert [output.logprobs for output in got[key]] == [output.logprobs for output in outputs]
    assert [got[f"r{number}", 0][0].cached_tokens for number in range(8)] == [0, 0, 0, 0, 112, 144, 96, 176]
    assert host.returned > 12


def test_host_memory_holds_as_many_pages_as_fit(directory: Path) -> None:
    runner = make_runner(directory, NUM_PAGES)
    assert runner.host_memory(5 * runner.page_bytes + 1, checksums=False).num_slots == 5
    with pytest.raises(ConfigError, match="holds no page; give at least"):
        runner.host_memory(runner.page_bytes - 1, checksums=False)
    with pytest.raises(ConfigError, match="lower --host-kv-memory"):
        runner.host_memory(1 << 50, checksums=False)
