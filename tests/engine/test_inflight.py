"""Steps that are launched before the tokens of the last one are known, on lanes that compute in the background."""

from dataclasses import replace

import pytest

from engine.engine import Engine
from engine.types import Request
from tests.engine.fakes import (
    FakeLane,
    FakeRunner,
    Served,
    arrive,
    assert_all_released,
    assert_as_expected,
    drain,
    expected,
    make_engine,
    make_request,
    prompt,
)


def in_flight(lane: FakeLane) -> int:
    """Number of steps that a lane has not computed yet."""
    return lane.waiting


def decoding(engine: Engine, *requests: Request) -> Served:
    """Serves these requests until all have their first token."""
    served = Served()
    for request in requests:
        engine.add(request)
    while len(served.token_ids) < sum(request.n for request in requests):
        served.take(engine.step())
    return served


def test_the_next_decodes_are_launched_before_the_tokens_are_known() -> None:
    engine, runner = make_engine(overlaps=True)
    requests = [make_request("a", prompt(20), max_tokens=10), make_request("b", prompt(7, 1), max_tokens=20)]
    served = decoding(engine, *requests)
    served.take(engine.step())
    assert in_flight(runner.full) == 1
    assert runner.batches[-1].token_sources is not None
    drain(engine, served)
    assert_as_expected(served, engine, *requests)
    assert_all_released(engine)
    # An end by length is known in advance, so nothing is computed in vain.
    assert sum(len(batch.samples) for batch in runner.batches) == 30
    assert runner.full.overlapped == 18  # all except the prompts' step and the first decode step


def test_steps_do_not_overlap_on_a_lane_that_computes_at_once() -> None:
    engine, runner = make_engine()
    request = make_request("a", prompt(20), max_tokens=10)
    assert_as_expected(drain(engine, decoding(engine, request)), engine, request)
    assert runner.full.overlapped == 0


@pytest.mark.parametrize("how", ["stop", "abort"])
def test_an_ended_request_keeps_its_pages_until_the_step_in_flight_is_computed(how: str) -> None:
    engine, runner = make_engine(num_pages=8, overlaps=True)
    request = make_request("a", prompt(20), max_tokens=40)
    if how == "stop":
        tokens = expected(request, 0, engine.max_model_len).token_ids
        last = next(token for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
        request = make_request("a", prompt(20), max_tokens=40, stop=[last])
    served = decoding(engine, request)
    if how == "stop":
        while not served.finish:
            served.take(engine.step())
        assert_as_expected(served, engine, request)
    else:
        served.take(engine.step())
        engine.abort("a")
    assert in_flight(runner.full) == 1
    assert engine.stats().running == 0
    assert engine.stats().pages.used > 0
    engine.check_integrity()
    assert engine.landings.reserve(make_request("b", prompt(16 * 7, 1))) is None  # the pages are not available
    assert not drain(engine).token_ids
    assert_all_released(engine)


def test_a_new_request_is_admitted_when_the_step_in_flight_is_collected() -> None:
    engine, runner = make_engine(overlaps=True)
    first, second = make_request("a", prompt(20), max_tokens=30), make_request("b", prompt(9, 1), max_tokens=5)
    served = decoding(engine, first)
    served.take(engine.step())
    engine.add(second)
    served.take(engine.step())
    assert in_flight(runner.full) == 0
    served.take(engine.step())
    assert "b" in {name for name, _ in served.token_ids}
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


@pytest.mark.parametrize("lacking", ["a row", "pages"])
def test_steps_overlap_although_a_request_waits_for_a_row_or_pages(lacking: str) -> None:
    engine, runner = make_engine(overlaps=True, num_pages=64 if lacking == "a row" else 9, max_num_seqs=2)
    requests = [make_request("a", prompt(20), max_tokens=40)]
    if lacking == "a row":
        requests.append(make_request("b", prompt(9, 1), max_tokens=30))
    served = decoding(engine, *requests)
    waits = make_request("waits", prompt(100, 2), max_tokens=5)
    engine.add(waits)
    served.take(engine.step())
    served.take(engine.step())
    assert engine.stats().waiting == 1
    assert in_flight(runner.full) == 1
    assert runner.batches[-1].token_sources is not None
    while engine.stats().running == len(requests):
        served.take(engine.step())
    for _ in range(2):  # the step in flight, then the request that waited
        served.take(engine.step())
    assert engine.stats().waiting == 0
    assert_as_expected(drain(engine, served), engine, *requests, waits)
    assert_all_released(engine)


def test_a_request_that_waited_for_a_prefix_starts_when_that_is_computed() -> None:
    engine, runner = make_engine(overlaps=True, token_budget=31)
    first, second = make_request("a", prompt(32), max_tokens=60), make_request("b", prompt(40), max_tokens=5)
    served = Served()
    engine.add(first)
    served.take(engine.step())
    engine.add(second)
    served.take(engine.step())  # computes the last token of the first prompt, which completes its second block
    assert in_flight(runner.full) == 1
    for _ in range(2):  # the step in flight, then the request that waited
        served.take(engine.step())
    assert ("b", 0) in served.token_ids
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


def test_a_landing_joins_when_the_step_in_flight_is_collected() -> None:
    engine, runner = make_engine(overlaps=True)
    first, second = make_request("a", prompt(20), max_tokens=30), make_request("b", prompt(40, 1), max_tokens=12)
    served = decoding(engine, first)
    served.take(engine.step())
    reservation = engine.landings.reserve(second)
    assert reservation is not None
    assert in_flight(runner.full) == 1
    arrive(engine, runner, reservation, second, served)
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


def test_steps_with_penalties_do_not_overlap() -> None:
    engine, runner = make_engine(overlaps=True)
    request = make_request("a", prompt(20), max_tokens=10)
    request = replace(request, params=replace(request.params, frequency_penalty=0.5))
    drain(engine, decoding(engine, request))
    assert runner.full.overlapped == 0


def test_other_lanes_begin_when_the_step_in_flight_is_collected() -> None:
    engine, runner = make_engine(overlaps=True, colocate="lanes")
    first, second = make_request("a", prompt(20), max_tokens=30), make_request("b", prompt(60, 1), max_tokens=12)
    served = decoding(engine, first)
    served.take(engine.step())
    assert in_flight(runner.full) == 1
    engine.add(second)
    served.take(engine.step())
    assert in_flight(runner.full) == 0
    served.take(engine.step())
    assert runner.prefill_lane.running
    served.take(engine.step())
    assert in_flight(runner.decode_lane) == 1
    assert in_flight(runner.full) == 0
    runner.prefill_lane.finish()
    served.take(engine.step())
    assert in_flight(runner.decode_lane) == 0
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


class TestWaitingForTheLane:
    """A prompt waits for the prefill lane, which computes another one."""

    def engine(self, *decodes: Request, max_num_seqs: int = 8) -> tuple[Engine, FakeRunner, Served]:
        engine, runner = make_engine(
            num_pages=128, overlaps=True, colocate="auto", max_model_len=1000, max_num_seqs=max_num_seqs, itl_ms=40
        )
        served = decoding(engine, *decodes)
        for number, name in enumerate(("on the lane", "waits for it")):
            engine.add(make_request(name, prompt(300, 10 + number), max_tokens=1))
        for _ in range(4):
            served.take(engine.step())
        assert runner.prefill_lane.running
        assert engine.stats().waiting == 1
        return engine, runner, served

    def decodes(self) -> list[Request]:
        return [make_request(f"d{number}", prompt(20, number), max_tokens=100) for number in range(2)]

    def passes(self, engine: Engine, served: Served, name: str) -> bool:
        """True if a request soon has its first token, while the others wait for the lane."""
        for _ in range(3):
            served.take(engine.step())
        assert {"on the lane", "waits for it"}.isdisjoint(served.finish)
        return (name, 0) in served.token_ids

    def test_decodes_still_overlap(self) -> None:
        requests = self.decodes()
        engine, runner, served = self.engine(*requests)
        overlapped = runner.decode_lane.overlapped
        for _ in range(10):
            served.take(engine.step())
        assert runner.decode_lane.overlapped == overlapped + 10
        while engine.has_work or runner.prefill_lane.running:
            drain(engine, served)
            if runner.prefill_lane.running:
                runner.prefill_lane.finish()
        assert_as_expected(served, engine, *requests)
        assert {"on the lane", "waits for it"} <= {name for name, _ in served.finish}
        assert_all_released(engine)

    def test_a_new_short_prompt_may_pass(self) -> None:
        engine, _, served = self.engine(*self.decodes())
        engine.add(make_request("short", prompt(3, 20)))
        assert self.passes(engine, served, "short")

    def test_a_prompt_that_lacked_a_row_may_pass_when_a_stream_ends(self) -> None:
        engine, _, served = self.engine(*self.decodes(), max_num_seqs=4)
        engine.add(make_request("short", prompt(3, 20)))
        assert not self.passes(engine, served, "short")
        engine.abort("d0")
        assert self.passes(engine, served, "short")

    def test_a_prompt_that_needs_a_block_of_the_one_on_the_lane_may_pass_when_that_is_computed(self) -> None:
        engine, runner, served = self.engine(*self.decodes())
        engine.add(make_request("short", prompt(18, 10)))
        assert not self.passes(engine, served, "short")
        runner.prefill_lane.finish()
        assert self.passes(engine, served, "short")


def test_the_runner_notices_pages_that_change_too_early() -> None:
    """The fake runner would notice an error."""
    engine, runner = make_engine(overlaps=True)
    request = make_request("a", prompt(20), max_tokens=30)
    served = decoding(engine, request)
    served.take(engine.step())
    assert isinstance(runner, FakeRunner)
    used = next(page for page in range(runner.num_pages) if runner.pages[page][0] >= 0)
    runner.pages[used] = [0] * 16
    drain(engine, served)
    assert served.token_ids["a", 0] != expected(request, 0, engine.max_model_len).token_ids
