"""Tenants that share workers: whole workers, real gRPC, a runner without a model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cpd.performance.model import Profile, Work
from cpd.rpc import cpd_pb2 as pb
from kvtransfer.local import LocalNetwork
from tests.decode_worker.pair import pair
from tests.engine.fakes import MODEL, make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import running
from tests.worker.fakes import Gate, fake_loader


def first_tokens(router: Client) -> list[int]:
    """Request numbers in the order of their first tokens."""
    outputs = [output for message in router.messages for output in message.step.outputs]
    return list(dict.fromkeys(output.request for output in outputs))


@dataclass
class Busy:
    """A session with a worker that runs one request at a time; number 0 is running, slowly."""

    router: Client
    gate: Gate

    async def end_first(self) -> None:
        """Ends request 0, so that the waiting requests run."""
        await self.router.abort(0)
        self.gate.open()


@asynccontextmanager
async def busy_worker(redis_url: str, **settings: Any) -> AsyncIterator[Busy]:
    gate = Gate()
    load = fake_loader(before_step=gate.wait)
    async with (
        running("combined", redis_url, network=LocalNetwork(), load=load, max_num_seqs=1, **settings) as worker,
        Client(worker) as router,
    ):
        gate.slow()
        running_one = await router.submit(make_request("running", prompt(50), max_tokens=900), 0)
        await eventually(lambda: running_one.started)
        yield Busy(router, gate)


async def submit(router: Client, number: int, length: int, **terms: Any) -> Answer:
    return await router.submit(make_request(str(number), prompt(length, number), max_tokens=1), number, **terms)


async def test_a_flood_leaves_the_other_tenant_its_share(redis_url: str) -> None:
    async with busy_worker(redis_url) as busy:
        router = busy.router
        answers = [await submit(router, number, 500, tenant="flood") for number in range(1, 31)]
        answers += [await submit(router, number, 500, tenant="other") for number in range(101, 106)]
        await eventually(lambda: router.load.waiting == 35)
        assert router.load.queued_tokens == 35 * 500
        assert router.load.prefill_ms > router.load.waiting_tokens / 64 * MODEL.step_ms(Work.prefill(64)) * 0.9
        await busy.end_first()
        await router.done(*answers)
        others = [place for place, number in enumerate(first_tokens(router)) if number > 100]
        assert max(others) < 14, "five of each tenant, the running one, and those due to age"


async def test_a_flood_uses_up_only_its_own_share_of_the_queue(redis_url: str) -> None:
    async with busy_worker(redis_url, max_queue_tokens=500) as busy:
        router = busy.router
        flood = [await submit(router, number, 100, tenant="flood") for number in range(1, 9)]
        await eventually(lambda: sum(answer.refusal is not None for answer in flood) == 3)
        refused = [answer.refusal for answer in flood if answer.refusal]
        assert not any(refusal.over_share for refusal in refused)
        assert all(refusal.retry_after_ms > 0 for refusal in refused)
        other = await submit(router, 101, 100, tenant="other")
        late = await submit(router, 102, 100, tenant="flood")
        await eventually(lambda: late.refusal is not None)
        assert late.refusal is not None
        assert (late.refusal.kind, late.refusal.over_share) == (pb.Refusal.KIND_QUEUE_FULL, True)
        await busy.end_first()
        await router.done(other, *flood)
        assert other.refusal is None


async def test_priority_and_deadline_reach_the_prefill_worker(redis_url: str) -> None:
    async with busy_worker(redis_url) as busy:
        router = busy.router
        terms = [(0, 0), (0, 600_000), (0, 300_000), (-1, 1000), (2, 0)]
        answers = [
            await submit(router, number, 50, priority=priority, deadline_ms=deadline_ms)
            for number, (priority, deadline_ms) in enumerate(terms, start=1)
        ]
        await eventually(lambda: router.load.waiting == len(terms))
        await busy.end_first()
        await router.done(*answers)
        assert first_tokens(router) == [0, 5, 3, 2, 1, 4]
        assert answers[3].queue_ms[0] > answers[2].queue_ms[0] > 0


async def test_remote_prefills_are_shared_fairly_too(redis_url: str) -> None:
    async with pair(redis_url) as p:
        p.prefill_gate.close()
        answers = [
            await p.submit(make_request(f"a{number}", prompt(300, number), max_tokens=1), number, tenant="flood")
            for number in range(8)
        ]
        await eventually(lambda: p.prefill_view.load.waiting >= 7)
        answers.append(await p.submit(make_request("b", prompt(300, 50), max_tokens=1), 100, tenant="other"))
        await eventually(lambda: p.prefill_view.load.waiting >= 8)
        assert p.prefill_view.load.prefill_ms > 0
        p.prefill_gate.open()
        await p.router.done(*answers)
        assert first_tokens(p.router).index(100) <= 4
        assert all(answer.prefilled[0].prefill_worker for answer in answers)
        assert answers[-1].queue_ms[0] > 0
        await p.balanced()


async def test_hello_has_the_profile(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as worker, Client(worker) as router:
        assert Profile.model_validate_json(router.hello.profile) == MODEL.profile
        assert (router.hello.token_budget, router.hello.colocate) == (64, "mixed")
        answer = await router.submit(make_request("a", prompt(100), max_tokens=50), 1)
        await router.done(answer)
        await eventually(lambda: router.load.step_ms > 0 and router.load.prefill_ms == 0)
