"""Pages that may still be written to."""

from cpd.rpc import cpd_pb2 as pb
from tests.decode_worker.pair import assert_right, pair
from tests.decode_worker.unsafe import Unsafe
from tests.engine.fakes import make_request, prompt
from tests.waiting import eventually
from worker.context import EXIT_RESTART


async def test_pages_come_back_when_the_landing_is_safe(redis_url: str) -> None:
    async with pair(redis_url) as p:
        p.transfer_gate.clear()
        unsafe = Unsafe(p.decode)
        answer = await p.submit(make_request("a", prompt(300)), 1)
        await p.waits_for_pages(answer)
        await p.router.abort(1)
        await eventually(lambda: p.router.load.quarantined_pages == 19)
        await p.prefill_view.balanced()
        assert p.router.load.quarantined_pages == 19
        request = make_request("b", prompt(300, 2), max_tokens=20)
        p.transfer_gate.set()
        other = await p.submit(request, 2)
        await p.router.done(other)
        assert_right(request, other)
        unsafe.gone.set()
        await p.balanced()


async def test_too_many_quarantined_pages_for_too_long_restart_the_worker(redis_url: str) -> None:
    # a machine that stands still for longer than this makes the worker compute the prompt itself
    async with pair(redis_url, decode={"num_pages": 66}, prefill_progress_s=3.0) as p:
        p.transfer_gate.clear()
        Unsafe(p.decode)
        answer = await p.submit(make_request("a", prompt(300)), 1)
        await p.waits_for_pages(answer)
        await p.router.abort(1)
        assert await p.decode.task == EXIT_RESTART


async def test_a_short_quarantine_does_not_restart_the_worker(redis_url: str) -> None:
    async with pair(redis_url, decode={"num_pages": 66}) as p:
        p.transfer_gate.clear()
        unsafe = Unsafe(p.decode)
        answer = await p.submit(make_request("a", prompt(300)), 1)
        await p.waits_for_pages(answer)
        await p.router.abort(1)
        await eventually(lambda: p.restarts_soon)
        unsafe.gone.set()
        await eventually(lambda: not p.restarts_soon)
        await p.balanced()
        assert p.router.load.state == pb.STATE_READY
