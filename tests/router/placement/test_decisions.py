import asyncio
from collections.abc import AsyncIterator
from typing import Any

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


def _decision(placement: Placement, request_id: str = "r", tenant: str = "t") -> Decision:
    return Decision(tenant, request_id, placement, prompt_tokens=100, attempt=0, choice=0, placed_at=5.0)


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
        "prefill": "p",
        "prefix_source": "q",
        "cached_tokens": 32,
        "queue_ms": 7.0,
        "wake_ms": 0.0,
        "ttft_ms": 100.0,
        "first_gap_ms": 300.0,
        "itl_ms": 133.333,
        "longest_gap_ms": 300.0,
        "outputs": 4,
    }


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
