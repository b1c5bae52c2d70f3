"""A real model in float32 sleeps in the middle of its answers. The tokens are those of an undisturbed run."""

import asyncio
import os
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cpd.common.blocks import extend_hashes, hash_root
from cpd.common.errors import CheckpointError
from cpd.rpc import cpd_pb2 as pb
from engine.types import Request, SamplingParams
from kvtransfer.local import LocalNetwork
from tests.conftest import MakeCheckpoint
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from worker.engine_loader import load_engine
from worker.sleeper import Sleeper

TOKENS = 200
"""Length of an answer."""

SETTINGS = {"dtype": "float32", "device": "cpu", "kv_memory": 16 << 20, "max_num_seqs": 8, "device_memory": 1 << 30}


def make_requests(tenant: str) -> list[Request]:
    """Greedy and sampled ones, one with several choices, two with a common prefix."""
    numbers, root = random.Random(1), hash_root(tenant.encode())
    shared = numbers.choices(range(3, 400), k=64)
    requests = []
    for i in range(5):
        token_ids = (shared if i < 2 else []) + numbers.choices(range(3, 400), k=40 + 60 * i)
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=TOKENS, repetition_penalty=1.0 + i % 3 / 10
        )
        hashes = extend_hashes(root, token_ids)
        requests.append(Request(f"r{i}", token_ids, len(token_ids), params, root, hashes, n=2 if i == 3 else 1))
    return requests


@asynccontextmanager
async def serving(
    redis_url: str, model: Path, network: LocalNetwork | None = None, role: Any = "combined", **settings: Any
) -> AsyncIterator[tuple[Running, Client, Sleeper]]:
    """A worker with a real engine, a session with it, and what puts its model to sleep."""
    given: dict[str, Any] = {**SETTINGS, "model": str(model), **settings}
    async with running(role, redis_url, load=load_engine, network=network or LocalNetwork(), **given) as worker:
        sleeper = worker.worker._sleeper
        assert sleeper is not None
        async with Client(worker) as router:
            yield worker, router, sleeper


async def submit(router: Client, requests: list[Request], first: int = 0, **options: Any) -> list[Answer]:
    return [await router.submit(request, first + i, **options) for i, request in enumerate(requests)]


async def until(answers: list[Answer], tokens: int) -> None:
    """Waits until the first answer has this many tokens."""
    await eventually(lambda: len(answers[0].tokens.get(0, ())) >= tokens)


async def asleep(router: Client, sleeper: Sleeper) -> None:
    """Puts the model to sleep; checks that its memory is free and nothing more is sent."""
    await sleeper.sleep()
    await eventually(lambda: router.load.residency.state == pb.Residency.STATE_ASLEEP)
    await eventually(lambda: router.load.free_pages == router.hello.num_pages)


@pytest.fixture(scope="module")
def model(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("qwen3")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("host_kv_memory", [0, 16 << 20])
async def test_streams_go_on_with_the_tokens_of_an_undisturbed_run(
    redis_url: str, model: Path, host_kv_memory: int, staged: bool
) -> None:
    async with serving(redis_url, model, host_kv_memory=host_kv_memory, staging_memory=staged << 30) as (
        _,
        router,
        sleeper,
    ):
        undisturbed = await submit(router, make_requests("one"))
        await router.done(*undisturbed)
        if staged:
            await eventually(lambda: sleeper.facts(time.monotonic()).staged_bytes > 0)
        disturbed = await submit(router, make_requests("another"), 100)
        late = []
        for tokens in (TOKENS // 4, TOKENS // 2):
            await until(disturbed, tokens)
            await asleep(router, sleeper)
            assert not any(answer.done for answer in disturbed)
            late.append(await router.submit(make_requests("late")[2], 1000 + tokens))
            await sleeper.wake()
        await router.done(*disturbed, *late)
        assert [answer.tokens for answer in late] == [undisturbed[2].tokens] * 2
        assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
        await router.balanced()


async def test_a_checkpoint_that_vanished_fails_the_wake_and_streams_go_on_when_it_is_back(
    redis_url: str, model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    async with serving(redis_url, directory) as (_, router, sleeper):
        undisturbed = await submit(router, make_requests("one"))
        await router.done(*undisturbed)
        disturbed = await submit(router, make_requests("another"), 100)
        await until(disturbed, TOKENS // 4)
        await asleep(router, sleeper)
        os.rename(directory, tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="model"):
            await sleeper.wake()
        assert not any(answer.done for answer in disturbed)
        os.rename(tmp_path / "elsewhere", directory)
        await sleeper.wake()
        await router.done(*disturbed)
        assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]


@pytest.mark.parametrize("host_kv_memory", [0, 16 << 20])
async def test_also_while_a_prompt_is_prefilled_elsewhere_or_a_prefix_fetched(
    redis_url: str, model: Path, host_kv_memory: int
) -> None:
    network = LocalNetwork(pages_ms=lambda pages: 20.0 * pages)  # so that pages are on their way for a while
    async with (
        serving(redis_url, model, network, "prefill") as (prefill, prefill_view, _),
        serving(redis_url, model, network, host_kv_memory=host_kv_memory) as (_, router, sleeper),
    ):
        undisturbed = await submit(router, make_requests("one"))
        await router.done(*undisturbed)
        await prefill_view.done(*await submit(prefill_view, make_requests("another")[:2]))
        source = pb.PrefixSource(worker_id=prefill.id, address=prefill.session, blocks=4)
        fetching = await submit(router, make_requests("another")[:2], 100, prefix_source=source)
        remote = await submit(router, make_requests("another")[2:], 200, candidates=[prefill.candidate])
        for _ in range(3):
            await asyncio.sleep(0.05)
            await asleep(router, sleeper)
            await sleeper.wake()
        disturbed = [*fetching, *remote]
        await router.done(*disturbed)
        assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
        await router.balanced()
        await prefill_view.balanced()
