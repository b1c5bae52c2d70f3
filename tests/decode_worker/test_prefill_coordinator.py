import pytest

from engine.engine import Engine
from engine.types import Request
from tests.decode_worker.pair import assert_right, pair
from tests.engine.fakes import make_request, prompt
from tests.waiting import eventually


async def test_a_request_that_waits_for_a_prefix_looks_it_up_once_per_source_and_not_after_each_step(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    lookups: list[str] = []
    steps = 0
    uncached_tokens, step = Engine.uncached_tokens, Engine.step

    def counted(engine: Engine, request: Request) -> int:
        lookups.append(request.id)
        return uncached_tokens(engine, request)

    def counted_step(engine: Engine, now: float = 0.0) -> object:
        nonlocal steps
        steps += 1
        return step(engine, now)

    first, second = make_request("a", prompt(900), max_tokens=5), make_request("b", prompt(900), max_tokens=5)
    async with pair(redis_url) as p:
        p.decode_gate.close()
        here = await p.submit(first, 1, candidates=[])
        await eventually(lambda: p.decode_gate.held)
        monkeypatch.setattr(Engine, "uncached_tokens", counted)
        monkeypatch.setattr(Engine, "step", counted_step)
        waiting = await p.submit(second, 2)
        p.decode_gate.open()
        await p.router.done(here, waiting)
        assert_right(first, here)
        assert_right(second, waiting)
        assert steps > 10
        assert len(lookups) <= 3
        assert p.router.load.remote_prefills == {}
