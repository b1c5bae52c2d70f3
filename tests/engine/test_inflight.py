"""Steps that are launched before the tokens of the last one are known, on lanes that compute later."""

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


def on_its_way(lane: FakeLane) -> int:
    """Steps that a lane has not computed yet."""
    return lane.waiting


def decoding(engine: Engine, *requests: Request) -> Served:
    """All of these have their first token."""
    served = Served()
    for request in requests:
        engine.add(request)
    while len(served.token_ids) < sum(request.n for request in requests):
        served.take(engine.step())
    return served


def test_decodes_have_their_next_step_before_their_tokens_are_known() -> None:
    engine, runner = make_engine(overlaps=True)
    requests = [make_request("a", prompt(20), max_tokens=10), make_request("b", prompt(7, 1), max_tokens=20)]
    served = decoding(engine, *requests)
    served.take(engine.step())
    assert on_its_way(runner.full) == 1
    assert runner.batches[-1].token_sources is not None
    drain(engine, served)
    assert_as_expected(served, engine, *requests)
    assert_all_released(engine)
    # Whoever ends by length is known to; so nothing is computed in vain.
    assert sum(len(batch.samples) for batch in runner.batches) == 30
    assert runner.full.overlapped == 18  # all but the prompts' step and the first one of decodes


def test_a_lane_that_computes_at_once_is_never_fed() -> None:
    engine, runner = make_engine()
    request = make_request("a", prompt(20), max_tokens=10)
    assert_as_expected(drain(engine, decoding(engine, request)), engine, request)
    assert runner.full.overlapped == 0


@pytest.mark.parametrize("how", ["stop", "abort"])
def test_who_ends_has_its_pages_until_the_step_on_its_way_is_computed(how: str) -> None:
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
    assert on_its_way(runner.full) == 1
    assert engine.stats().running == 0
    assert engine.stats().pages.used > 0
    engine.check_integrity()
    assert engine.reserve(make_request("b", prompt(16 * 7, 1))) is None  # they are nobody else's
    assert not drain(engine).token_ids
    assert_all_released(engine)


def test_what_comes_is_admitted_when_the_step_on_its_way_is_collected() -> None:
    engine, runner = make_engine(overlaps=True)
    first, second = make_request("a", prompt(20), max_tokens=30), make_request("b", prompt(9, 1), max_tokens=5)
    served = decoding(engine, first)
    served.take(engine.step())
    engine.add(second)
    served.take(engine.step())
    assert on_its_way(runner.full) == 0
    served.take(engine.step())
    assert "b" in {name for name, _ in served.token_ids}
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


@pytest.mark.parametrize("lacking", ["a row", "pages"])
def test_who_waits_for_what_others_have_does_not_keep_the_next_step_from_them(lacking: str) -> None:
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
    assert on_its_way(runner.full) == 1
    assert runner.batches[-1].token_sources is not None
    while engine.stats().running == len(requests):
        served.take(engine.step())
    for _ in range(2):  # what is on its way, and then the one that waited
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
    assert on_its_way(runner.full) == 1
    for _ in range(2):  # the step in flight, and then the request that waited
        served.take(engine.step())
    assert ("b", 0) in served.token_ids
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


def test_a_landing_joins_when_the_step_on_its_way_is_collected() -> None:
    engine, runner = make_engine(overlaps=True)
    first, second = make_request("a", prompt(20), max_tokens=30), make_request("b", prompt(40, 1), max_tokens=12)
    served = decoding(engine, first)
    served.take(engine.step())
    reservation = engine.reserve(second)
    assert reservation is not None
    assert on_its_way(runner.full) == 1
    arrive(engine, runner, reservation, second, served)
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


def test_choices_that_look_back_have_all_their_tokens() -> None:
    engine, runner = make_engine(overlaps=True)
    request = make_request("a", prompt(20), max_tokens=10)
    request = replace(request, params=replace(request.params, frequency_penalty=0.5))
    drain(engine, decoding(engine, request))
    assert runner.full.overlapped == 0


def test_other_lanes_begin_when_the_step_on_its_way_is_collected() -> None:
    engine, runner = make_engine(overlaps=True, colocate="lanes")
    first, second = make_request("a", prompt(20), max_tokens=30), make_request("b", prompt(60, 1), max_tokens=12)
    served = decoding(engine, first)
    served.take(engine.step())
    assert on_its_way(runner.full) == 1
    engine.add(second)
    served.take(engine.step())
    assert on_its_way(runner.full) == 0
    served.take(engine.step())
    assert runner.prefill_lane.running
    served.take(engine.step())
    assert on_its_way(runner.decode_lane) == 1
    assert on_its_way(runner.full) == 0
    runner.prefill_lane.finish()
    served.take(engine.step())
    assert on_its_way(runner.decode_lane) == 0
    assert_as_expected(drain(engine, served), engine, first, second)
    assert_all_released(engine)


class TestBehindTheLane:
    """A prompt waits for the prefill lane, which computes another one."""

    def engine(self, *decodes: Request, max_num_seqs: int = 8) -> tuple[Engine, FakeRunner, Served]:
        engine, runner = make_engine(
            num_pages=128, overlaps=True, colocate="auto", max_model_len=1000, max_num_seqs=max_num_seqs, itl_ms=40
        )
        served = decoding(engine, *decodes)
        for number, name in enumerate(("on the lane", "behind it")):
            engine.add(make_request(name, prompt(300, 10 + number), max_tokens=1))
        for _ in range(4):
            served.take(engine.step())
        assert runner.prefill_lane.running
        assert engine.stats().waiting == 1
        return engine, runner, served

    def decodes(self) -> list[Request]:
        return [make_request(f"d{number}", prompt(20, number), max_tokens=100) for number in range(2)]

    def passes(self, engine: Engine, served: Served, name: str) -> bool:
        """Whether a request has its first token soon, while the others wait for the lane."""
        for _ in range(3):
            served.take(engine.step())
        assert {"on the lane", "behind it"}.isdisjoint(served.finish)
        return (name, 0) in served.token_ids

    def test_it_does_not_keep_the_next_step_from_the_decodes(self) -> None:
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
        assert {"on the lane", "behind it"} <= {name for name, _ in served.finish}
        assert_all_released(engine)

    def test_who_comes_may_pass(self) -> None:
        engine, _, served = self.engine(*self.decodes())
        engine.add(make_request("short", prompt(3, 20)))
        assert self.passes(engine, served, "short")

    def test_who_lacked_a_row_may_pass_when_a_stream_ends(self) -> None:
        engine, _, served = self.engine(*self.decodes(), max_num_seqs=4)
        engine.add(make_request("short", prompt(3, 20)))
        assert not self.passes(engine, served, "short")
        engine.abort("d0")
        assert self.passes(engine, served, "short")

    def test_who_needs_a_block_of_the_prompt_on_the_lane_may_pass_when_it_is_computed(self) -> None:
        engine, runner, served = self.engine(*self.decodes())
        engine.add(make_request("short", prompt(18, 10)))
        assert not self.passes(engine, served, "short")
        runner.prefill_lane.finish()
        assert self.passes(engine, served, "short")


def test_the_runner_notices_pages_that_change_too_early() -> None:
    """The fake is worth something."""
    engine, runner = make_engine(overlaps=True)
    request = make_request("a", prompt(20), max_tokens=30)
    served = decoding(engine, request)
    served.take(engine.step())
    assert isinstance(runner, FakeRunner)
    used = next(page for page in range(runner.num_pages) if runner.pages[page][0] >= 0)
    runner.pages[used] = [0] * 16
    drain(engine, served)
    assert served.token_ids["a", 0] != expected(request, 0, engine.max_model_len).token_ids
