from typing import Any

import pytest

from cpd.perfmodel import PerfModel, Profile, ShareProfile, StepCost, Work
from cpd.rpc import cpd_pb2 as pb
from cpd.split import LaneSplit
from router.candidate import NOMINAL
from router.checks import NonsenseError
from router.view import FORGOTTEN_S, MOST_LATE, MOST_PROFILE_BYTES, MOST_SLOWER, UNSEEN_S, WorkerView

COST = StepCost(tokens=(1, 1000), tokens_ms=(1.0, 100.0))
PROFILE = Profile(
    schema="cpd-profile/1",
    source="measured",
    device="d",
    model="m",
    shares=(ShareProfile(share=1.0, decode=COST, prefill=COST),),
)


def _view(**hello: Any) -> WorkerView:
    profile = PROFILE.model_dump_json(by_alias=True).encode()
    return WorkerView(pb.Hello(**{"worker_id": "w", "profile": profile, **hello}), "w:1", itl_ms=50.0)


def test_a_candidate_has_what_hello_and_load_say() -> None:
    view = _view(
        num_pages=100,
        page_bytes=64,
        host_page_ms=0.5,
        max_num_seqs=32,
        token_budget=256,
        colocate="lanes",
        decode_shares=[0.25],
    )
    view.reported(
        pb.Load(running=3, waiting=2, decodes=2, decode_context=500, prefill_ms=40, free_pages=7, cached_pages=9), 1.0
    )
    one = view.candidate
    assert (one.worker_id, one.address, one.token_budget) == ("w", "w:1", 256)
    assert (one.beside.rule.mode, one.beside.rule.splits) == ("lanes", (LaneSplit(0.75, 0.25),))
    assert (one.num_pages, one.page_bytes, one.free_pages, one.cached_pages) == (100, 64, 7, 9)
    assert (one.host_page_ms, one.max_num_seqs) == (0.5, 32)
    assert (one.requests, one.beside.decodes) == (5, Work.decode(2, 500))
    assert one.queue_ms(1.0) == pytest.approx(40)
    assert one.queue_ms(1.03) == pytest.approx(10)
    assert one.queue_ms(2.0) == 0
    assert one.beside.step_ms(Work.prefill(500)) == PerfModel(PROFILE).step_ms(Work.prefill(500))


def test_own_requests_count_at_once_and_others_by_report() -> None:
    view = _view()
    view.reported(pb.Load(running=4), 0.0)
    view.began(2)
    assert view.candidate.requests == 6
    view.reported(pb.Load(running=6), 0.1)
    assert view.candidate.requests == 6
    view.ended(1)
    assert view.candidate.requests == 5


def test_a_prompt_lengthens_the_queue_until_a_report_names_it() -> None:
    view = _view()
    view.reported(pb.Load(prefill_ms=20), 0.0)
    view.sent(1, 100.0, 0.0)
    assert view.candidate.queue_ms(0.0) == pytest.approx(120)
    view.reported(pb.Load(prefill_ms=10, unanswered=[7]), 0.001)  # another router's
    assert view.candidate.queue_ms(0.001) == pytest.approx(110)
    view.sent(2, 30.0, 0.002)
    view.reported(pb.Load(prefill_ms=110, unanswered=[7, 1]), 0.003)
    assert view.candidate.queue_ms(0.003) == pytest.approx(140)
    view.reported(pb.Load(prefill_ms=140, unanswered=[2, 7, 1]), 0.004)
    assert view.candidate.queue_ms(0.004) == pytest.approx(140)


def test_late_prompts_do_not_lengthen_the_queue_of_one_that_can_be_in_time() -> None:
    view = _view()
    view.reported(pb.Load(prefill_ms=2000, late_ms=1500, slower=2.0), 0.0)
    assert view.candidate.queue_ms(0.0) == pytest.approx(1000)
    assert view.candidate.passed_ms == pytest.approx(3000)


def test_a_prompt_that_no_report_names_is_not_reckoned_with_for_ever() -> None:
    view = _view()
    view.sent(1, 100.0, 0.0)
    view.reported(pb.Load(prefill_ms=60), 2 * UNSEEN_S)
    assert view.candidate.queue_ms(2 * UNSEEN_S) == pytest.approx(60)


def test_an_answered_prompt_is_not_added_to_the_next_report() -> None:
    view = _view()
    view.sent(1, 100.0, 0.0)
    view.answered(1)
    view.answered(1)
    view.reported(pb.Load(), 0.01)
    assert view.candidate.queue_ms(0.01) == 0


def test_a_prompt_that_is_sent_to_an_idle_worker_begins_now() -> None:
    view = _view()
    view.reported(pb.Load(prefill_ms=5), 0.0)
    view.sent(1, 100.0, 10.0)
    assert view.candidate.queue_ms(10.05) == pytest.approx(50)


def test_without_a_profile_waiting_tokens_tell_the_queue() -> None:
    view = _view(profile=b"")
    view.reported(pb.Load(prefill_ms=20, late_ms=10, waiting_tokens=5_000), 0.0)
    assert view.candidate.beside.rule.model is NOMINAL
    assert view.candidate.queue_ms(0.0) == pytest.approx(5_000 * view.candidate.token_ms)
    assert view.candidate.passed_ms == 0


def test_a_worker_that_is_slower_than_its_profile_is_reckoned_with_as_it_is() -> None:
    view = _view()
    view.reported(pb.Load(prefill_ms=40, decodes=2, decode_context=500), 1.0)
    fast = view.candidate
    view.reported(pb.Load(prefill_ms=40, decodes=2, decode_context=500, slower=1.5), 1.0)
    slow = view.candidate
    assert slow.queue_ms(1.0) == pytest.approx(1.5 * fast.queue_ms(1.0))
    assert slow.crowded_ms == pytest.approx(1.5 * fast.crowded_ms)
    assert slow.prefill(300, 0).ms == pytest.approx(1.5 * fast.prefill(300, 0).ms)


def test_one_that_was_very_slow_for_a_while_is_not_avoided_for_ever() -> None:
    view = _view()
    view.reported(pb.Load(slower=1000.0), 1.0)
    assert view.candidate.beside.slower == MOST_SLOWER


def test_steps_are_expected_to_be_as_much_longer_beside_prompts_as_they_lately_were() -> None:
    view = _view()
    streams = pb.Load(running=2, decodes=2, decode_context=500)
    view.reported(streams, 1.0)
    alone = view.candidate
    streams.step_ms = 2.5 * alone.crowded_ms
    view.reported(streams, 1.0)
    stretched = view.candidate
    assert stretched.crowded_ms == pytest.approx(2.5 * alone.crowded_ms)
    assert stretched.grown_ms(1000) == pytest.approx(2.5 * alone.grown_ms(1000))
    assert stretched.beside.alone_ms == alone.beside.alone_ms
    streams.slower = 2.5  # all its steps take longer, not only those beside prompts
    view.reported(streams, 1.0)
    assert view.candidate.crowded_ms == pytest.approx(stretched.crowded_ms)


@pytest.mark.parametrize(
    ("hello", "load", "stretch"),
    [
        ({}, pb.Load(decodes=2, step_ms=0.01), 1.0),
        ({}, pb.Load(decodes=2, step_ms=1e6), MOST_SLOWER),
        ({}, pb.Load(step_ms=1e6), 1.0),
        ({"profile": b""}, pb.Load(decodes=2, step_ms=1e6), 1.0),
        ({"profile": Profile.instant().model_dump_json(by_alias=True).encode()}, pb.Load(decodes=2, step_ms=10), 1.0),
    ],
    ids=["shorter", "bounded", "long ago", "no profile", "no time"],
)
def test_steps_that_say_nothing_of_prompts_stretch_nothing(
    hello: dict[str, Any], load: pb.Load, stretch: float
) -> None:
    view = _view(**hello)
    view.reported(load, 1.0)
    assert view.candidate.stretch == stretch


@pytest.mark.parametrize("shares", [[0.0], [1.0], [float("nan")], [0.5] * 65])
def test_shares_that_no_lane_can_have_are_refused(shares: list[float]) -> None:
    with pytest.raises(NonsenseError, match="shares of the device"):
        _view(decode_shares=shares)


@pytest.mark.parametrize("profile", [b"x", b"{}", PROFILE.model_dump_json(by_alias=True).encode()[:-1]])
def test_a_corrupt_profile_is_told_in_one_sentence(profile: bytes) -> None:
    with pytest.raises(NonsenseError) as error:
        _view(profile=profile)
    assert "what it predicts with is not a profile" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_is_no_larger_than_profiles_are() -> None:
    with pytest.raises(NonsenseError, match="no profile needs so many"):
        _view(profile=b" " * (MOST_PROFILE_BYTES + 1))


def test_times_beyond_reason_are_in_no_profile() -> None:
    absurd = PROFILE.model_dump_json(by_alias=True).replace("100.0", "1.7e308").encode()
    with pytest.raises(NonsenseError, match="what it predicts with is not a profile"):
        _view(profile=absurd)


class TestLate:
    """A worker that promises what it does not keep."""

    def test_what_it_says_counts_less_the_later_its_first_tokens_come(self) -> None:
        lies, honest = _view(), _view()
        for view in (lies, honest):
            view.reported(pb.Load(), 0.0)
        for now in range(30):
            one = lies.candidate
            predicted_ms = one.wait_ms(500, now) + one.prefill(500, 0).ms
            lies.predictions.add(predicted_ms, 1000.0, one.late, now)
            lies.reported(pb.Load(), now)
        assert 300.0 <= lies.candidate.wait_ms(500, 30) + lies.candidate.prefill(500, 0).ms <= 1000.0
        assert lies.candidate.crowded_ms >= honest.candidate.crowded_ms
        assert honest.candidate.late == 1.0

    def test_even_one_that_says_it_takes_no_time_at_all(self) -> None:
        view = _view(profile=Profile.instant().model_dump_json(by_alias=True).encode())
        for now in range(30):
            one = view.candidate
            predicted_ms = one.wait_ms(500, now) + one.prefill(500, 0).ms
            view.predictions.add(predicted_ms, 1000.0, one.late, now)
            view.reported(pb.Load(), now)
        assert 300.0 <= view.candidate.wait_ms(500, 30) <= 1000.0
        assert view.candidate.crowded_ms > 1.0

    def test_usual_errors_change_nothing(self) -> None:
        view = _view()
        for now in range(30):
            view.predictions.add(100.0, 190.0 if now % 2 else 60.0, 1.0, now)
            view.reported(pb.Load(), now)
            assert view.candidate.late == 1.0

    def test_is_bounded_and_forgotten(self) -> None:
        view = _view()
        for _ in range(100):
            view.predictions.add(1.0, 1e9, view.candidate.late, 0.0)
            view.reported(pb.Load(), 0.0)
        assert view.candidate.late == MOST_LATE
        view.reported(pb.Load(), 10 * FORGOTTEN_S)
        assert view.candidate.late == 1.0
