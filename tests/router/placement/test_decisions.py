import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cpd.common.policy_settings import PolicySettings
from cpd.rpc import cpd_pb2 as pb
from router.placement.candidate import Candidate
from router.placement.cost_policy import CostPolicy
from router.placement.decisions import MAX_DECISIONS, Decision, Decisions
from router.placement.policy import Placement, Prompt
from router.prefix_index.index import Prefixes
from tests.router.conftest import Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer
from tests.router.placement.situations import situation

CHAT: dict[str, Any] = {"model": "small-model", "messages": [{"role": "user", "content": "Hello?"}]}


def _placement(*workers: Candidate, cached: Prefixes | None = None) -> Placement:
    return CostPolicy(PolicySettings()).place(situation(Prompt(100, 10), workers, cached=cached or Prefixes()))


def _decision(placement: Placement, request_id: str = "r", tenant: str = "t", *, ticks: bool = False) -> Decision:
    return Decision(
        tenant,
        request_id,
        placement,
        prompt_tokens=100,
        attempt=0,
        choice=0,
        received=4.0,
        placed_at=5.0,
        streams=placement.decode.decodes,
        ticks=array("f") if ticks else None,
    )


def test_shows_actual_and_predicted_times() -> None:
    decision = _decision(_placement(Candidate("a", "a:1", ttft_factor=2.5)))
    assert decision.describe()["actual"] is None
    decision.prefilled = pb.Prefilled(cached_tokens=32, prefill_worker="p", queue_ms=7.0, prefix_worker="q")
    for now in (5.1, 5.4, 5.45, 5.5):
        decision.on_output(now)
    told = decision.describe()
    assert (told["predicted"]["decode"], told["predicted"]["ttft_factor"]) == ("a", 2.5)
    actual = {name: round(value, 3) if isinstance(value, float) else value for name, value in told["actual"].items()}
    assert actual == {
        "decode": "a",
        "prefill": "p",
        "prefix_source": "q",
        "cached_tokens": 32,
        "queue_ms": 7.0,
        "wake_ms": 0.0,
        "ttft_ms": 100.0,
        "first_gap_ms": 300.0,
        "itl_ms": 133.333,
        "longest_gap_ms": 300.0,
        "last_ms": 1500.0,
        "outputs": 4,
        "fetched": None,
        "landed": None,
        "ticks_ms": None,
    }
    assert (told["placed_ms"], told["ended_ms"]) == (1000.0, None)


def test_shows_pages_that_came_from_other_workers() -> None:
    decision = _decision(_placement(Candidate("a", "a:1", page_bytes=1024)))
    decision.prefilled = pb.Prefilled(fetched=pb.Landed(pages=3, waited_ms=2.0))
    decision.landed = pb.Landed(pages=5, waited_ms=0.5)
    decision.on_output(6.0)
    actual = decision.describe()["actual"]
    assert [
        (actual[name]["pages"], actual[name]["bytes"], actual[name]["waited_ms"]) for name in ("fetched", "landed")
    ] == [
        (3, 3072, 2.0),
        (5, 5120, 0.5),
    ]
    assert actual["landed"]["alone_ms"] >= 0


def test_remembers_the_times_of_tokens_up_to_a_limit_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.decisions.MAX_TICKS", 3)
    decision = _decision(_placement(Candidate("a", "a:1")), ticks=True)
    for now in (5.1, 5.4, 5.45, 5.5):
        decision.on_output(now)
    decision.end("finished", 6.0)
    told = decision.describe()
    assert (told["actual"]["ticks_ms"], told["actual"]["outputs"]) == ([1100.0, 1400.0, 1450.0], 4)
    assert (told["outcome"], told["ended_ms"]) == ("finished", 2000.0)


def test_without_internals_it_tells_nothing_of_others() -> None:
    workers = [Candidate("a", "a:1"), Candidate("other", "o:1", idle_at=3.0), Candidate("third", "t:1", idle_at=1.0)]
    decision = _decision(_placement(*workers))
    decision.on_output(6.0)
    decision.end("reroute: other has 7 streams", 7.0)
    told = decision.describe(internals=False)
    assert "other" not in str(told)
    assert "third" not in str(told)
    assert told.keys() == {
        *("attempt", "prompt_tokens", "placed_ms", "ended_ms", "actual", "outcome", "predicted", "options")
    }
    assert told["outcome"] == "reroute"
    (option,) = told["options"]
    assert option == told["predicted"]
    assert option.keys() == {"route", "uncached_tokens", "ttft_ms", "itl_ms"}


def test_counts_the_requests_that_wait_for_their_first_token_by_their_way() -> None:
    decisions, placement = Decisions(), _placement(Candidate("a", "a:1"))
    waiting, other, started, refused = [_decision(placement, str(number)) for number in range(4)]
    for one in (waiting, other, started, refused):
        decisions.add(one)
    started.on_output(6.0)
    refused.end("queue_full", 6.0)
    assert decisions.on_the_way() == {("", "a", ""): 2}


def test_a_prompt_has_waited_for_a_wake_at_most_as_long_as_in_the_queue_of_its_worker() -> None:
    for prefill_worker, wake_ms in (("", 30.0), ("p", 40.0)):
        decision = _decision(_placement(Candidate("a", "a:1")))
        decision.wake_s = 0.04
        decision.on_prefilled(pb.Prefilled(queue_ms=30.0, prefill_worker=prefill_worker))
        decision.on_output(6.0)
        assert decision.describe()["actual"]["wake_ms"] == wake_ms


def test_an_output_of_one_token_has_no_gaps() -> None:
    decision = _decision(_placement(Candidate("a", "a:1")))
    decision.on_output(6.0)
    assert decision.describe()["actual"]["itl_ms"] is None


def test_the_reason_compares_with_the_next_best() -> None:
    idle, busy = Candidate("idle", "i:1"), Candidate("busy", "b:1", idle_at=1.0)
    why = _decision(_placement(idle, busy)).describe()["why"]
    assert why == "the lowest cost of 2 options; busy costs 1000.0 ms more"
    assert _decision(_placement(idle)).describe()["why"] == "the only option"
    kept = Prefixes({"idle": 5}, {"idle": 2})
    told = _decision(_placement(idle, cached=kept)).describe()
    assert told["why"] == "the only option; 48 tokens are loaded from host memory"
    assert (told["predicted"]["uncached_tokens"], told["predicted"]["host_tokens"]) == (20, 48)
    assert "as good as" in _decision(_placement(idle, Candidate("twin", "t:1"))).describe()["why"]


def test_decisions_are_limited_and_separate_for_each_tenant() -> None:
    decisions, placement = Decisions(), _placement(Candidate("a", "a:1"))
    for number in range(MAX_DECISIONS + 1):
        decisions.add(_decision(placement, str(number)))
    assert decisions.find("t", "0") == []
    assert len(decisions.find("t", "1")) == 1
    assert decisions.find("other", "1") == []


class TestEndpoint:
    async def test_shows_where_a_request_went_and_its_latencies(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(
            await start_worker(says("fox", prefill_worker="prefill-0")),
            await start_worker(worker_id="prefill-0", kind="prefill"),
            long_prefill_tokens=4,
        )
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        told = (await router.http.get(f"/requests/{response.headers['x-request-id']}")).json()
        (placement,) = told["placements"]
        assert told["id"] == response.headers["x-request-id"]
        assert placement["outcome"] == "finished"
        assert (placement["predicted"]["decode"], placement["predicted"]["prefill"]) == ("combined-0", "prefill-0")
        assert placement["actual"]["prefill"] == "prefill-0"
        assert placement["actual"]["ttft_ms"] > 0
        assert len(placement["options"]) == 1
        metrics = (await router.http.get("/metrics")).text
        assert 'cpd_placements_total{replicated="no",route="remote"} 1.0' in metrics
        assert 'cpd_worker_ttft_seconds_count{role="prefill",router="router-a",worker="prefill-0"} 1.0' in metrics
        assert 'cpd_worker_ttft_error_seconds_count{role="prefill",router="router-a",worker="prefill-0"} 1.0' in metrics

    async def test_shows_the_time_of_each_token_to_who_asked_for_it(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("the quick brown fox")))
        for name, headers in (("with", {"x-cpd-ticks": "1"}), ("without", {}), ("zero", {"x-cpd-ticks": "0"})):
            await router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": name, **headers})
        told = {name: (await router.http.get(f"/requests/{name}")).json() for name in ("with", "without", "zero")}
        actual = {name: one["placements"][0]["actual"] for name, one in told.items()}
        assert actual["without"]["ticks_ms"] is actual["zero"]["ticks_ms"] is None
        ticks = actual["with"]["ticks_ms"]
        assert len(ticks) == actual["with"]["outputs"] > 3
        assert ticks == sorted(ticks)
        (placement,) = told["with"]["placements"]
        assert 0 <= placement["placed_ms"] <= ticks[0] <= ticks[-1] <= placement["ended_ms"]
        assert ticks[-1] == pytest.approx(actual["with"]["last_ms"], abs=0.1)

    async def test_shows_running_requests_and_every_attempt(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        refusals = iter([pb.Refusal(kind=pb.Refusal.KIND_REROUTE, message="drains")])
        proceed = asyncio.Event()

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            if refusal := next(refusals, None):
                yield refusal
                return
            await proceed.wait()
            async for output in says("fox")(submit):
                yield output

        worker = await start_worker(script)
        router = await start_router(worker)
        call = asyncio.create_task(
            router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a/b:1"})
        )

        async def placed_twice() -> bool:
            return len(worker.submits) == 2

        await eventually(placed_twice)
        outcomes = [one["outcome"] for one in (await router.http.get("/requests/a/b:1")).json()["placements"]]
        assert outcomes == ["reroute: drains", "running"]
        proceed.set()
        await call

    async def test_a_tenant_sees_its_own_requests_only(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("fox")), api_key=["one", "two"])
        await router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})
        assert (await router.http.get("/requests/mine")).status_code == 200
        other = await router.http.get("/requests/mine", headers={"authorization": "Bearer two"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "request_not_found")
        assert (await router.http.get("/requests/mine", headers={"authorization": ""})).status_code == 401

    async def test_a_tenant_sees_no_worker_but_its_own(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Path
    ) -> None:
        (tmp_path / "keys.yaml").write_text("- key: user\n- key: boss\n  admin: true\n")
        workers = [await start_worker(says("fox"), worker_id=f"combined-{number}") for number in range(2)]
        router = await start_router(*workers, api_key=["plain"], api_key_file=tmp_path / "keys.yaml")
        seen = {}
        for key in ("user", "boss"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
            await router.http.post("/v1/chat/completions", json=CHAT, headers=headers)
            (seen[key],) = (await router.http.get("/requests/mine", headers=headers)).json()["placements"]
        used = seen["user"]["actual"]["decode"]
        unused = {worker.id for worker in workers} - {used}
        assert not [name for name in unused if name in str(seen["user"])]
        assert all(name in str(seen["boss"]) for name in unused)
        assert seen["boss"]["options"][0]["cost"]
