"""Requests whose prompt a prefill worker computes: two workers, real gRPC between them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from cpd.rpc import cpd_pb2 as pb
from decode_worker.fill import State
from decode_worker.service import DecodeService
from engine.types import Finish, Request
from kvtransfer.base import Landing
from kvtransfer.local import LocalNetwork
from tests.engine.fakes import expected, make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from tests.worker.fakes import MAX_MODEL_LEN, Gate, fake_loader
from worker.node import EXIT_RESTART


@dataclass
class Pair:
    """One prefill and one decode worker, a session with each, and a gate in front of each one's steps."""

    prefill: Running
    decode: Running
    router: Client
    prefill_view: Client
    prefill_gate: Gate
    decode_gate: Gate
    transfer_gate: asyncio.Event
    network: LocalNetwork

    async def submit(self, request: Request, number: int, **options: Any) -> Answer:
        """Submits with the prefill worker as candidate."""
        return await self.router.submit(request, number, **{"candidates": [self.prefill.candidate], **options})

    def states(self) -> list[State]:
        """Of the decode worker's fills."""
        service = self.decode.worker._service
        assert isinstance(service, DecodeService)
        return [fill.state for fill in service._fills]

    async def balanced(self) -> None:
        await self.router.balanced()
        await self.prefill_view.balanced()


@asynccontextmanager
async def pair(
    redis_url: str, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Pair]:
    prefill_gate, decode_gate, transfer_gate = Gate(), Gate(), asyncio.Event()
    transfer_gate.set()
    network = LocalNetwork()
    settings["network"] = network
    prefill_load = fake_loader(before_step=prefill_gate.wait, **(prefill or {}))
    decode_load = fake_loader(before_step=decode_gate.wait, **(decode or {}))
    async with (
        running("prefill", redis_url, load=prefill_load, transfer_gate=transfer_gate, **settings) as p,
        running("combined", redis_url, load=decode_load, **settings) as d,
        Client(p.address) as prefill_view,
        Client(d.address) as router,
    ):
        try:
            yield Pair(p, d, router, prefill_view, prefill_gate, decode_gate, transfer_gate, network)
        finally:
            transfer_gate.set()
            prefill_gate.open()
            decode_gate.open()


def assert_right(request: Request, answer: Answer) -> None:
    for choice in range(request.first_choice, request.first_choice + request.n):
        want = expected(request, choice, MAX_MODEL_LEN)
        assert answer.tokens[choice] == want.token_ids
        assert answer.finish[choice] is want.finish


async def test_a_long_prompt_is_computed_there_and_decoded_here(redis_url: str) -> None:
    request = make_request("a", prompt(300), max_tokens=20)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0] == pb.Prefilled(cached_tokens=0, prefill_worker=p.prefill.worker.id)
        await p.balanced()
        assert p.router.load.prefill_tokens == 0
        assert p.prefill_view.load.prefill_tokens == 300
        assert dict(p.router.load.fills) == {"completed": 1}
        assert dict(p.prefill_view.load.fills) == {"completed": 1}


async def test_a_short_prompt_stays_here(redis_url: str) -> None:
    request = make_request("a", prompt(32))
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1, long_prefill_tokens=32)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].prefill_worker == ""
        assert p.router.load.fills == {}


async def test_a_prompt_that_is_mostly_cached_here_stays_here(redis_url: str) -> None:
    async with pair(redis_url) as p:
        await p.router.done(await p.submit(make_request("a", prompt(300)), 1))
        request = make_request("b", prompt(310), max_tokens=20)
        answer = await p.submit(request, 2)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0] == pb.Prefilled(cached_tokens=288)


async def test_only_what_is_missing_here_is_moved(redis_url: str) -> None:
    async with pair(redis_url) as p:
        await p.router.done(await p.submit(make_request("a", prompt(300)), 1))
        request = make_request("b", prompt(300) + prompt(200, 3), max_tokens=20)
        answer = await p.submit(request, 2)
        await p.router.done(answer)
        assert_right(request, answer)
        assert answer.prefilled[0].cached_tokens == 288
        await p.balanced()
        assert p.prefill_view.load.prefill_tokens == 300 + 500 - 288


async def test_what_only_the_prefill_worker_has_cached_is_moved_too(redis_url: str) -> None:
    async with pair(redis_url) as p:
        await p.router.done(await p.submit(make_request("a", prompt(300)), 1))
        async with running("combined", redis_url, network=p.network) as other, Client(other.address) as router:
            request = make_request("b", prompt(300), max_tokens=20)
            answer = await router.submit(request, 1, candidates=[p.prefill.candidate])
            await router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].cached_tokens == 288
            await router.balanced()


async def test_several_choices_share_one_fill(redis_url: str) -> None:
    request = make_request("a", prompt(200), max_tokens=20, n=4)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        assert {prefilled.prefill_worker for prefilled in answer.prefilled.values()} == {p.prefill.worker.id}
        await p.balanced()


@pytest.mark.parametrize("n", [1, 3])
async def test_first_tokens_that_are_the_last_cancel_the_push(redis_url: str, n: int) -> None:
    request = make_request("a", prompt(200), max_tokens=1, n=n)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        await p.balanced()
        assert dict(p.router.load.fills) == {"completed": 1}


async def test_a_choice_that_ends_with_its_first_token_does_not_stop_the_others(redis_url: str) -> None:
    free = make_request("a", prompt(200), max_tokens=20, n=3)
    firsts = [expected(free, choice, MAX_MODEL_LEN).token_ids[0] for choice in range(3)]
    assert len(set(firsts)) == 3
    request = make_request("a", prompt(200), max_tokens=20, n=3, stop=[firsts[1]])
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert_right(request, answer)
        assert (answer.tokens[1], answer.finish[1]) == ([firsts[1]], Finish.STOP)
        await p.balanced()


async def test_a_replayed_request_is_filled_with_its_output(redis_url: str) -> None:
    want = expected(make_request("a", prompt(200), max_tokens=30), 0, MAX_MODEL_LEN)
    request = make_request("a", prompt(200) + want.token_ids[:13], prompt_len=200, max_tokens=30)
    async with pair(redis_url) as p:
        answer = await p.submit(request, 1)
        await p.router.done(answer)
        assert answer.tokens[0] == want.token_ids[13:]
        assert answer.prefilled[0].prefill_worker == p.prefill.worker.id


async def test_equal_prompts_at_once_are_filled_once(redis_url: str) -> None:
    requests = [make_request(f"r{i}", [*prompt(300), i], seed=i, max_tokens=20) for i in range(10)]
    async with pair(redis_url) as p:
        answers = [await p.submit(request, i) for i, request in enumerate(requests)]
        await p.router.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            assert_right(request, answer)
        await p.balanced()
        assert p.prefill_view.load.prefill_tokens == 301
        assert dict(p.router.load.fills) == {"completed": 1}


async def test_many_prompts_take_turns_when_pages_are_few(redis_url: str) -> None:
    requests = [make_request(f"r{i}", prompt(200 + i, i), max_tokens=30, n=1 + i % 2) for i in range(20)]
    async with pair(redis_url, prefill={"num_pages": 40}, decode={"num_pages": 70}) as p:
        answers = [await p.submit(request, i) for i, request in enumerate(requests)]
        await p.router.done(*answers)
        for request, answer in zip(requests, answers, strict=True):
            assert_right(request, answer)
        await p.balanced()
        assert dict(p.router.load.fills) == {"completed": 20}


class TestFailure:
    async def test_the_next_candidate_takes_over(self, redis_url: str) -> None:
        request = make_request("a", prompt(200), max_tokens=20)
        async with pair(redis_url) as p:
            dead = pb.PrefillCandidate(worker_id="dead", address=f"127.0.0.1:{_closed_port()}")
            answer = await p.submit(request, 1, candidates=[dead, p.prefill.candidate])
            await p.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].prefill_worker == p.prefill.worker.id
            await p.balanced()
            assert dict(p.router.load.fills) == {"completed": 1, "failed": 1}

    async def test_without_another_candidate_the_request_is_placed_anew(self, redis_url: str) -> None:
        async with pair(redis_url) as p:
            dead = pb.PrefillCandidate(worker_id="dead", address=f"127.0.0.1:{_closed_port()}")
            answer = await p.submit(make_request("a", prompt(200)), 1, candidates=[dead])
            await p.router.done(answer)
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            assert "dead" in answer.refusal.message
            await p.balanced()
            assert dict(p.router.load.fills) == {"failed": 1, "rerouted": 1}

    async def test_other_weights_are_refused_with_a_clear_message(self, redis_url: str) -> None:
        async with pair(redis_url, prefill={"fingerprint": b"another model"}) as p:
            answer = await p.submit(make_request("a", prompt(200)), 1)
            await p.router.done(answer)
            assert answer.refusal is not None
            assert "differ in weights" in answer.refusal.message
            await p.balanced()

    async def test_a_silent_prefill_worker_is_given_up(self, redis_url: str) -> None:
        async with pair(redis_url, fill_progress_s=0.5) as p, _silent_server() as address:
            silent = pb.PrefillCandidate(worker_id="silent", address=address)
            answer = await p.submit(make_request("a", prompt(200)), 1, candidates=[silent])
            await p.router.done(answer)
            assert answer.refusal is not None
            assert "no progress" in answer.refusal.message

    async def test_a_hanging_engine_is_given_up_although_its_process_answers(self, redis_url: str) -> None:
        async with pair(redis_url, fill_progress_s=1.5) as p:
            p.prefill_gate.close()
            answer = await p.submit(make_request("a", prompt(200)), 1)
            await p.router.done(answer)
            assert answer.refusal is not None
            assert "no progress" in answer.refusal.message
            p.prefill_gate.open()
            await p.balanced()

    async def test_a_fill_that_only_waits_for_its_turn_is_not_given_up(self, redis_url: str) -> None:
        """Deadlines measure progress: the queue moves on, so nobody in it is forgotten."""
        requests = [make_request(f"r{i}", prompt(900, i), max_tokens=2) for i in range(6)]
        async with pair(redis_url, fill_progress_s=1.5, decode={"num_pages": 70}) as p:
            answers = [await p.submit(request, i) for i, request in enumerate(requests)]
            await p.router.done(*answers)
            for request, answer in zip(requests, answers, strict=True):
                assert_right(request, answer)
            assert p.router.load.fills["completed"] == 6

    async def test_a_full_queue_there_is_the_next_ones_turn(self, redis_url: str) -> None:
        async with pair(redis_url, max_queue_tokens=400) as p:
            p.prefill_gate.close()
            answers = [await p.submit(make_request(f"r{i}", prompt(300, i), max_tokens=3), i) for i in range(6)]
            await eventually(lambda: any(answer.refusal for answer in answers))
            p.prefill_gate.open()
            await p.router.done(*answers)
            assert {a.refusal.kind for a in answers if a.refusal} == {pb.Refusal.KIND_REROUTE}
            assert any(answer.finish for answer in answers)
            await p.balanced()

    @pytest.mark.parametrize("n", [1, 3])
    async def test_first_tokens_of_a_failed_fill_are_kept(self, redis_url: str, n: int) -> None:
        """The prefill worker ends after its first tokens: they are facts, and the rest follows from them."""
        request = make_request("a", prompt(207), max_tokens=20, n=n)
        async with pair(redis_url) as p:
            p.transfer_gate.clear()
            answer = await p.submit(request, 1)
            await eventually(lambda: len(answer.tokens) == n)
            await p.prefill.stop()
            await p.router.done(answer)
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            for choice in range(n):
                assert answer.tokens[choice] == expected(request, choice, MAX_MODEL_LEN).token_ids[:1]
            await p.router.balanced()

    async def test_the_next_candidate_goes_on_after_the_first_token_of_the_one_before(self, redis_url: str) -> None:
        request = make_request("a", prompt(207), max_tokens=20)
        async with pair(redis_url) as p, running("prefill", redis_url, network=p.network) as second:
            p.transfer_gate.clear()
            answer = await p.submit(request, 1, candidates=[p.prefill.candidate, second.candidate])
            await eventually(lambda: answer.started)
            await p.prefill.stop()
            await p.router.done(answer)
            assert_right(request, answer)
            assert answer.prefilled[0].prefill_worker == p.prefill.worker.id
            await p.router.balanced()
            assert dict(p.router.load.fills) == {"completed": 1, "failed": 1}

    @pytest.mark.parametrize("n", [1, 3])
    async def test_what_is_short_by_now_is_computed_here(self, redis_url: str, n: int) -> None:
        """While the fill waits in the prefill worker's queue, somebody else's request brings the prefix."""
        async with reached(redis_url, State.QUEUED, n, num_pages=256) as (p, answer):
            await p.router.done(await p.router.submit(make_request("b", prompt(290)), 3))
            await p.prefill.stop()
            await p.router.done(answer)
            assert_right(make_request("a", prompt(300), max_tokens=20, n=n), answer)
            assert answer.prefilled[0] == pb.Prefilled(cached_tokens=288)
            await p.router.balanced()
            assert p.router.load.fills["local_fallback"] == 1

    async def test_whoever_waits_for_a_failed_fill_goes_on_by_itself(self, redis_url: str) -> None:
        """And what the fill has emitted stays right, whether it can go on here or is placed anew."""
        request, other = make_request("a", prompt(207), max_tokens=20, n=3), make_request("b", prompt(200))
        async with pair(redis_url) as p:
            p.transfer_gate.clear()
            first = await p.submit(request, 1)
            await eventually(lambda: len(first.tokens) == 3)
            second = await p.router.submit(other, 2)
            await eventually(lambda: p.router.load.waiting == 2)
            await p.prefill.stop()
            await p.router.done(first, second)
            assert_right(other, second)
            for choice in range(3):
                want = expected(request, choice, MAX_MODEL_LEN).token_ids
                assert first.tokens[choice] == (want[:1] if first.refusal else want)
            await p.router.balanced()


BEFORE_TOKENS = [State.CONNECTING, State.QUEUED, State.RESERVING, State.LANDED]
EVERY_STATE = [*BEFORE_TOKENS, State.FIRST, State.DECIDED]
TARGET = 1


@asynccontextmanager
async def reached(redis_url: str, state: State, n: int = 1, num_pages: int = 66) -> AsyncIterator[tuple[Pair, Answer]]:
    """A request with number TARGET whose fill is held in `state`; behind another one where that takes another one."""
    async with pair(redis_url, decode={"num_pages": num_pages}) as p, _silent_server() as silent:
        candidates = [p.prefill.candidate]
        match state:
            case State.CONNECTING:
                candidates = [pb.PrefillCandidate(worker_id="silent", address=silent)]
            case State.QUEUED:
                p.prefill_gate.close()
                await p.submit(make_request("ahead", prompt(900, 9), max_tokens=2), 2)
                await eventually(lambda: p.states() == [State.LANDED] and p.prefill_gate.held)
            case State.RESERVING:
                p.transfer_gate.clear()
                await p.submit(make_request("ahead", prompt(900, 9), max_tokens=2), 2)
                await eventually(lambda: p.states() == [State.FIRST])
            case State.LANDED:
                p.prefill_gate.close()
            case State.FIRST:
                p.transfer_gate.clear()
        request = make_request("a", prompt(300), max_tokens=700 if state is State.DECIDED else 20, n=n)
        answer = await p.submit(request, TARGET, candidates=candidates)
        if state is State.DECIDED:
            await eventually(lambda: all(len(answer.tokens.get(choice, [])) > 1 for choice in range(n)))
        else:
            await eventually(lambda: p.states()[-1:] == [state])
        yield p, answer
        p.prefill_gate.open()
        p.transfer_gate.set()


class TestAbort:
    @pytest.mark.parametrize("state", EVERY_STATE)
    async def test_an_abort_frees_everything_on_both_sides(self, redis_url: str, state: State) -> None:
        async with reached(redis_url, state) as (p, answer):
            await p.router.abort(TARGET)
            p.prefill_gate.open()
            p.transfer_gate.set()
            await p.balanced()
            assert not answer.done
            if state is not State.DECIDED:
                await eventually(lambda: p.router.load.fills["cancelled"] == 1)

    @pytest.mark.parametrize("state", EVERY_STATE)
    async def test_choices_can_be_aborted_one_by_one(self, redis_url: str, state: State) -> None:
        async with reached(redis_url, state, n=3) as (p, answer):
            before = {choice: list(tokens) for choice, tokens in answer.tokens.items()}
            await p.router.abort(TARGET, [0])
            await p.router.abort(TARGET, [2])
            if state in (State.CONNECTING, State.DECIDED):
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

    @pytest.mark.parametrize("state", EVERY_STATE)
    async def test_the_end_of_the_session_is_an_abort(self, redis_url: str, state: State) -> None:
        async with reached(redis_url, state) as (p, _), Client(p.decode.address, router_id="other") as other:
            await p.router.__aexit__()
            p.prefill_gate.open()
            p.transfer_gate.set()
            await other.balanced()
            await p.prefill_view.balanced()


class TestEnd:
    @pytest.mark.parametrize("state", EVERY_STATE)
    async def test_the_prefill_worker_ends(self, redis_url: str, state: State) -> None:
        async with reached(redis_url, state) as (p, answer):
            stopping = asyncio.create_task(p.prefill.stop())
            await asyncio.sleep(0)
            p.prefill_gate.open()
            if state is State.CONNECTING:
                await p.router.abort(TARGET)
            else:
                await p.router.done(answer)
                if answer.refusal is None:  # what had left before the end was enough
                    assert_right(make_request("a", prompt(300), max_tokens=len(answer.tokens[0])), answer)
                assert state is not State.FIRST or answer.refusal
            await stopping
            await p.router.balanced()

    @pytest.mark.parametrize("state", EVERY_STATE)
    async def test_the_decode_worker_ends(self, redis_url: str, state: State) -> None:
        async with reached(redis_url, state) as (p, answer):
            await p.decode.stop()
            assert answer.refusal is not None
            assert answer.refusal.kind == pb.Refusal.KIND_REROUTE
            p.prefill_gate.open()
            p.transfer_gate.set()
            await p.prefill_view.balanced()


class TestQuarantine:
    """A transport in whose landings a write is under way until the test says otherwise."""

    async def test_pages_come_back_when_the_landing_is_safe(self, redis_url: str) -> None:
        async with pair(redis_url) as p:
            p.transfer_gate.clear()
            unsafe = Unsafe(p.decode)
            answer = await p.submit(make_request("a", prompt(300)), 1)
            await eventually(lambda: answer.started)
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

    async def test_too_much_of_it_for_too_long_starts_the_worker_anew(self, redis_url: str) -> None:
        async with pair(redis_url, decode={"num_pages": 66}, fill_progress_s=0.5) as p:
            p.transfer_gate.clear()
            Unsafe(p.decode)
            answer = await p.submit(make_request("a", prompt(300)), 1)
            await eventually(lambda: answer.started)
            await p.router.abort(1)
            assert await p.decode.task == EXIT_RESTART

    async def test_a_moment_of_it_does_not(self, redis_url: str) -> None:
        async with pair(redis_url, decode={"num_pages": 66}, fill_progress_s=1.0) as p:
            p.transfer_gate.clear()
            unsafe = Unsafe(p.decode)
            answer = await p.submit(make_request("a", prompt(300)), 1)
            await eventually(lambda: answer.started)
            await p.router.abort(1)
            await eventually(lambda: p.router.load.quarantined_pages > 0)
            unsafe.gone.set()
            await p.balanced()
            await asyncio.sleep(1.0)  # longer than what would have been too long
            assert p.router.load.state == pb.STATE_READY


class Unsafe:
    """Makes a worker's landings unsafe until `gone` is set."""

    def __init__(self, worker: Running) -> None:
        self.gone = asyncio.Event()
        self._transport = worker.worker._transport
        self._expect = self._transport.expect
        self._transport.expect = self._unsafe  # type: ignore[method-assign]

    def _unsafe(self, reservation: int, generation: int, pages: Sequence[int]) -> Landing:
        return UnsafeLanding(self._expect(reservation, generation, pages), self.gone)


class UnsafeLanding:
    """A landing into which a write may still be under way until `gone` is set, unless it is complete."""

    def __init__(self, landing: Landing, gone: asyncio.Event) -> None:
        self._landing = landing
        self._gone = gone

    async def done(self) -> None:
        await self._landing.done()

    def revoke(self) -> bool:
        self._landing.revoke()
        return self._gone.is_set()

    async def peer_gone(self) -> None:
        await self._gone.wait()


def _closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@asynccontextmanager
async def _silent_server() -> AsyncIterator[str]:
    """Accepts connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"
