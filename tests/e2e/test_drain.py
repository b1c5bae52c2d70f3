"""Workers and routers are drained under load, and clients that do not retry notice nothing."""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cpd.common.errors import CPDError
from cpd.common.process import EXIT_DRAINED
from deploy.drain import drain
from deploy.state import ClusterDir
from models import tiny
from tests.e2e.client import MODEL, client, complete
from tests.e2e.cluster import START_S, Cluster, eventually

pytestmark = pytest.mark.e2e

AT_ONCE = 4
STREAMS = 8
STREAM_TOKENS = 600
"""Tokens of a stream that lasts longer than a router that is told to stop at once lets it run."""


@contextlib.contextmanager
def running(routers: int) -> Iterator[Cluster]:
    settings: dict[str, Any] = {"simulate": "h200-qwen3-8b", "combined": 2, "prefill": 0}
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name=MODEL,
        kv_memory="1GiB",
        routers=routers,
        drain_s=240.0,
        **settings,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_routers() -> Iterator[Cluster]:
    with running(2) as cluster:
        yield cluster


class Counts:
    """Requests that were answered, and the errors of the others."""

    def __init__(self) -> None:
        self.answered = 0
        self.errors: list[Exception] = []


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[Counts]:
    """Sends AT_ONCE requests at a time, each on a new connection and without retries, while the context is open."""
    counts, numbers, over = Counts(), itertools.count(), asyncio.Event()

    async def ask(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            try:
                await complete(http, [5, 6, next(numbers) % 2000], max_tokens=4)
                counts.answered += 1
            except (httpx.HTTPError, AssertionError) as error:
                counts.errors.append(error)

    async with client(url) as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask(http))
        try:
            yield counts
        finally:
            over.set()


async def until_more(counts: Counts, number: int) -> None:
    """Waits until this number of further requests have been answered."""
    wanted = counts.answered + number
    async with asyncio.timeout(START_S):
        while counts.answered < wanted and not counts.errors:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def restarted(cluster: Cluster, name: str) -> None:
    """Sends SIGTERM and waits until the process runs again."""
    starts = cluster.starts(name)
    cluster.send(name, signal.SIGTERM)
    await asyncio.to_thread(eventually, lambda: cluster.starts(name) > starts, f"{name} was started again")
    await asyncio.to_thread(cluster.wait_until_healthy)


def test_sigterm_to_one_of_two_routers_loses_no_request(two_routers: Cluster) -> None:
    async def check() -> None:
        async with load(two_routers.url) as counts, client(two_routers.url) as http:
            for name in ("router-0", "router-1", "router-0"):
                streams = [
                    asyncio.create_task(complete(http, [7, index], stream=True, max_tokens=STREAM_TOKENS))
                    for index in range(STREAMS)
                ]
                await until_more(counts, 20)
                await restarted(two_routers, name)
                for answer in await asyncio.gather(*streams):
                    assert len(answer.token_ids) == STREAM_TOKENS
                await until_more(counts, 20)
        assert not counts.errors

    asyncio.run(check())


def test_sigterm_to_the_only_router_cuts_no_stream_and_the_next_one_takes_what_waits() -> None:
    async def check(cluster: Cluster) -> None:
        async with load(cluster.url) as counts, client(cluster.url) as http:
            streams = [
                asyncio.create_task(complete(http, [7, index], stream=True, max_tokens=STREAM_TOKENS))
                for index in range(STREAMS)
            ]
            await until_more(counts, 20)
            await restarted(cluster, "router-0")
            for answer in await asyncio.gather(*streams):
                assert len(answer.token_ids) == STREAM_TOKENS
            await until_more(counts, 20)
        assert not counts.errors

    with running(1) as cluster:
        asyncio.run(check(cluster))


@pytest.fixture
def known(two_routers: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Lets commands find the cluster, as if `cpd up` had started it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with two_routers.known():
        yield


@pytest.mark.usefixtures("known")
def test_drain_names_the_processes_if_there_is_none_of_this_name() -> None:
    def named() -> bool:
        with pytest.raises(CPDError) as error:
            drain("default", "combined-9", None)
        return str(error.value).endswith("there are: combined-0, combined-1, router-0, router-1")

    eventually(named, "the router that answers knows the other one")


@pytest.mark.usefixtures("known")
def test_a_worker_is_drained_for_good_under_load(two_routers: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        async with load(two_routers.url) as counts:
            await until_more(counts, 20)
            await asyncio.to_thread(drain, "default", "combined-0", None)
            await until_more(counts, 20)
        assert not counts.errors

    asyncio.run(check())
    assert capsys.readouterr().out.splitlines()[-1] == "combined-0 has ended."
    assert [worker["id"] for worker in two_routers.state()["workers"]] == ["combined-1"]
    assert ClusterDir("default").drained() == ["combined-0"]


@pytest.mark.usefixtures("known")
def test_routers_are_drained_for_good_under_load(two_routers: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    async def check() -> None:
        async with load(two_routers.url) as counts, client(two_routers.url) as http:
            streams = [
                asyncio.create_task(complete(http, [7, index], stream=True, max_tokens=STREAM_TOKENS))
                for index in range(STREAMS)
            ]
            await until_more(counts, 20)
            await asyncio.to_thread(drain, "default", "router-1", None)
            for answer in await asyncio.gather(*streams):
                assert len(answer.token_ids) == STREAM_TOKENS
            await until_more(counts, 20)
        assert not counts.errors

    asyncio.run(check())
    eventually(lambda: two_routers.exit_code("router-1") == EXIT_DRAINED, "the supervisor has seen it")
    drain("default", "router-0", None)  # the last one: nobody answers any more
    assert capsys.readouterr().out.splitlines()[-1] == "router-0 has ended."
    eventually(lambda: two_routers.exit_code("router-0") == EXIT_DRAINED, "the supervisor has seen it")
    with pytest.raises(httpx.ConnectError):  # its supervisor has closed the socket
        httpx.get(two_routers.url)
