from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import pytest

from bench.client.client import Client
from bench.client.target import Target
from bench.errors import BenchError
from bench.interference.decodes import Decodes
from bench.record import Failure
from bench.settings import TargetSettings
from tests.bench.interference.engine_server import Engine, engine_server
from tests.waiting import eventually


@asynccontextmanager
async def decodes_of(engine: Engine, count: int, output_len: int) -> AsyncIterator[Decodes]:
    with engine_server(engine) as url:
        client = Client(Target.of(TargetSettings(url=url), "m"))
        async with Decodes(client, count, lambda tokens: "a " * tokens, 10, output_len) as decodes:
            yield decodes
        await client.close()


async def test_streams_decode_together_once_all_have_begun() -> None:
    async with decodes_of(Engine(), 3, 1000) as decodes:
        assert decodes.decoding_since_s() == inf
        assert decodes.seen_until_s() == 0
        await eventually(lambda: decodes.begun)
        since_s = decodes.decoding_since_s()
        assert since_s == max(stamps[0] for stamps in decodes.stamps)
        assert decodes.seen_until_s() == min(stamps[-1] for stamps in decodes.stamps)


async def test_a_stream_that_ends_is_started_again_as_another_one() -> None:
    async with decodes_of(Engine(), 3, 5) as decodes:
        await eventually(lambda: decodes.restarts(0, inf) >= 9)
        finished = decodes.stamps[:6]
        assert [len(stamps) for stamps in finished] == [5] * 6
        assert decodes.begun


async def test_a_refused_stream_is_reported_when_asked() -> None:
    async with decodes_of(Engine(longest=5), 1, 5) as decodes:
        with pytest.raises(BenchError, match="http_400 at most 5 tokens"):
            await eventually(lambda: decodes.seen_until_s() > 0)


async def test_the_end_aborts_all_streams() -> None:
    async with decodes_of(Engine(), 3, 1_000_000) as decodes:
        await eventually(lambda: decodes.begun)
    assert all(record.error == Failure.ABORTED for record in decodes.records)
