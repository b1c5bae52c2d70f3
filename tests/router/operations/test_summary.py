import logging

import pytest

from router.activity import Activity
from router.operations import summary
from tests.router.conftest import Says, StartRouter, StartWorker, eventually


async def test_a_router_says_what_it_does_and_only_while_it_does_something(
    start_router: StartRouter,
    start_worker: StartWorker,
    says: Says,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(summary, "PERIOD_S", 0.05)
    periods = 0
    take = Activity.take

    def counted(recent: Activity, period_s: float) -> dict[str, object]:
        nonlocal periods
        periods += 1
        return take(recent, period_s)

    monkeypatch.setattr(Activity, "take", counted)

    def lines() -> list[dict[str, object]]:
        return [record.__dict__["fields"] for record in caplog.records if record.name == "router.summary"]

    async def quiet() -> bool:
        return periods >= 3

    router = await start_router(await start_worker(says("the quick brown fox")))
    await eventually(quiet)
    assert lines() == []
    await router.http.post("/v1/completions", json={"model": "small-model", "prompt": "Hello", "max_tokens": 50})

    async def told() -> bool:
        return sum(int(str(line.get("calls", 0))) for line in lines()) == 1

    await eventually(told)
    assert lines()[-1]["workers"] == 1
    assert any("ttft_p50_ms" in line for line in lines())
