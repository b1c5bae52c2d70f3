"""Peers of a newer minor version."""

import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.decode_worker.pair import assert_right, pair
from tests.engine.fakes import make_request, prompt
from tests.newer import speak_newer

RARE = {"RouterMessage.park", "WorkerMessage.refusal", "WorkerMessage.batch", "WorkerMessage.end"} | {
    f"PrefillEvent.{kind}" for kind in ("alive", "progress", "refused")
}
"""Kinds that the traffic below need not contain."""


async def test_what_workers_do_not_know_is_ignored(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = speak_newer(monkeypatch)
    request = make_request("a", prompt(300), max_tokens=20)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        p.transfer_gate.clear()
        await p.submit(make_request("b", prompt(300, 5), max_tokens=500), 2)
        await p.router.abort(2)
        p.transfer_gate.set()
        await p.balanced()
    kinds = (pb.RouterMessage, pb.WorkerMessage, pb.PrefillRequest, pb.PrefillEvent)
    every = {f"{kind.__name__}.{field.name}" for kind in kinds for field in kind.DESCRIPTOR.oneofs[0].fields}
    assert sent >= every - RARE - {"PrefillRequest.cancel"}
