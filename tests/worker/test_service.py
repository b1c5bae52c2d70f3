"""Every worker answers requests, computes prompts for others and provides its cache, whatever its role."""

from cpd.rpc import cpd_pb2 as pb
from decode_worker.remote_prefill import RemotePrefillState
from tests.decode_worker.pair import assert_right, pair
from tests.engine.fakes import make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Client
from tests.worker.cluster import running


async def test_a_prefill_worker_answers_requests_and_a_combined_one_computes_for_it(redis_url: str) -> None:
    request = make_request("a", prompt(300))
    async with pair(redis_url) as p:
        answer = await p.prefill_view.submit(request, 1, candidates=[p.decode.candidate])
        await p.prefill_view.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].prefill_worker == p.decode.id
        await eventually(lambda: dict(p.router.load.remote_prefills) == {"completed": 1})
        await p.balanced()


async def test_a_prefill_worker_provides_its_cache(redis_url: str) -> None:
    request = make_request("a", prompt(300))
    async with pair(redis_url) as p:
        await p.prefill_view.done(await p.prefill_view.submit(request, 1))
        source = pb.PrefixSource(worker_id=p.prefill.id, address=p.prefill.session, blocks=18)
        answer = await p.router.submit(make_request("b", prompt(300)), 1, prefix_source=source)
        await p.router.done(answer)
        assert answer.prefilled[0].prefix_worker == p.prefill.id
        await eventually(lambda: p.prefill_view.load.prefix_fetches.get("served") == 1)
        await p.balanced()


async def test_a_worker_with_prefill_jobs_computes_its_own_requests_itself(redis_url: str) -> None:
    """Else two workers could wait for each other's pages."""
    async with pair(redis_url) as p:
        p.prefill_gate.close()
        theirs, own = make_request("a", prompt(300)), make_request("b", prompt(300, 5))
        first = await p.submit(theirs, 1)
        await eventually(lambda: p.prefill.worker._service.prefill.busy)
        second = await p.prefill_view.submit(own, 2, candidates=[p.decode.candidate])
        await eventually(lambda: p.prefill.worker._service.decode.busy)
        p.prefill_gate.open()
        await p.router.done(first)
        await p.prefill_view.done(second)
        assert_right(theirs, first)
        assert_right(own, second)
        assert second.prefilled[0].prefill_worker == ""
        await p.balanced()


async def test_a_worker_that_waits_for_pages_refuses_prefill_jobs(redis_url: str) -> None:
    async with (
        pair(redis_url) as p,
        running("combined", redis_url, network=p.network) as third,
        Client(third) as router,
    ):
        p.prefill_gate.close()
        waits, asks = make_request("a", prompt(300)), make_request("b", prompt(300, 5))
        first = await p.submit(waits, 1)
        await eventually(lambda: p.states() == [RemotePrefillState.LANDED])
        second = await router.submit(asks, 2, candidates=[p.decode.candidate])
        await router.done(second)
        assert second.refusal is not None
        assert second.refusal.kind == pb.Refusal.KIND_REROUTE
        assert list(second.refusal.failed_prefill_workers) == [p.decode.id]
        p.prefill_gate.open()
        await p.router.done(first)
        assert_right(waits, first)

        again = await router.submit(make_request("c", prompt(300, 6)), 3, candidates=[p.decode.candidate])
        await router.done(again)
        assert again.prefilled[0].prefill_worker == p.decode.id
        await p.balanced()
