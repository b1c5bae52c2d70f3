"""Aborts and ends in every state of a remote prefill: nothing hangs, and every page is freed."""

import asyncio

import pytest

from cpd.rpc import cpd_pb2 as pb
from decode_worker import remote_prefill
from tests.decode_worker.pair import TARGET, Stage, assert_right, reached
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Client
from tests.worker.fakes import MAX_MODEL_LEN

LONG_S = 3600.0


class TestAbort:
    @pytest.mark.parametrize("stage", Stage)
    async def test_an_abort_frees_everything_on_both_sides_without_a_timer(
        self, redis_url: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_prefill, "SILENT_S", LONG_S)
        async with reached(redis_url, stage, prefill_progress_s=LONG_S) as (p, answer):
            await p.router.abort(TARGET)
            p.prefill_gate.open()
            p.transfer_gate.set()
            await p.balanced()
            assert not answer.done
            if stage is not Stage.DECODING:
                # pages in flight may arrive before the abort
                ends = {"cancelled", "completed"} if stage is Stage.LANDED_FIRST else {"cancelled"}
                await eventually(lambda: sum(p.router.load.remote_prefills[end] for end in ends) == 1)

    @pytest.mark.parametrize("stage", Stage)
    async def test_choices_can_be_aborted_one_by_one(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage, n=3) as (p, answer):
            before = {choice: list(tokens) for choice, tokens in answer.tokens.items()}
            await p.router.abort(TARGET, [0])
            await p.router.abort(TARGET, [2])
            if stage in (Stage.CONNECTING, Stage.DECODING):
                await p.router.abort(TARGET, [1])
                await p.balanced()
                assert not answer.done
                return
            p.prefill_gate.open()
            p.transfer_gate.set()
            await eventually(lambda: 1 in answer.finish)
            want = expected(make_request("a", prompt(300), max_tokens=20, n=3), 1, MAX_MODEL_LEN)
            assert answer.tokens[1] == want.token_ids
            assert {c: tokens for c, tokens in answer.tokens.items() if c != 1} == {
                c: tokens for c, tokens in before.items() if c != 1
            }
            await p.balanced()

    @pytest.mark.parametrize("stage", Stage)
    async def test_the_end_of_the_session_is_an_abort(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage) as (p, _), Client(p.decode, router_id="other") as other:
            await p.router.__aexit__()
            p.prefill_gate.open()
            p.transfer_gate.set()
            await other.balanced()
            await p.prefill_view.balanced()


class TestEnd:
    @pytest.mark.parametrize("stage", Stage)
    async def test_the_prefill_worker_ends(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage) as (p, answer):
            stopping = asyncio.create_task(p.prefill.stop())
            await asyncio.sleep(0)
            p.prefill_gate.open()
            p.decode_gate.open()
            if stage is Stage.CONNECTING:
                await p.router.abort(TARGET)
            else:
                await p.router.done(answer)
                if answer.refusal is None:  # everything needed was sent before the end
                    assert_right(make_request("a", prompt(300), max_tokens=len(answer.tokens[0])), answer)
                assert stage is not Stage.LANDED_FIRST or answer.refusal
            await stopping
            await p.router.balanced()

    @pytest.mark.parametrize("stage", Stage)
    async def test_the_decode_worker_ends(self, redis_url: str, stage: Stage) -> None:
        async with reached(redis_url, stage) as (p, answer):
            await p.decode.stop()
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            p.prefill_gate.open()
            p.transfer_gate.set()
            await p.prefill_view.balanced()
