from collections.abc import Callable
from math import e
from typing import Any

import pytest

from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, Work
from cpd.performance.split import SplitShares
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError
from router.placement.candidate import ASSUMED_WAKE_MS, NOMINAL
from router.placement.learning import FORGET_S, RoleErrors, WorkerErrors
from router.placement.worker_load import MAX_SLOWDOWN, UNSEEN_S, WorkerLoad

COST = StepCost(tokens=(1, 1000), tokens_ms=(1.0, 100.0))
INSTANT = Profile.load("instant").model_dump_json(by_alias=True).encode()
PROFILE = Profile(
    schema="cpd-profile/1",
    source="measured",
    device="d",
    model="m",
    shares=(ShareProfile(share=1.0, decode=COST, prefill=COST),),
)


def _worker_load(**hello: Any) -> WorkerLoad:
    profile = PROFILE.model_dump_json(by_alias=True).encode()
    hello = {"worker_id": "w", "profile": profile, **hello}
    return WorkerLoad(pb.Hello(**hello), "w:1", itl_ms=50.0, errors=WorkerErrors(RoleErrors()))


def test_a_candidate_has_the_figures_of_hello_and_load() -> None:
    load = _worker_load(
        num_pages=100,
        page_bytes=64,
        host_page_ms=0.5,
        max_num_seqs=32,
        token_budget=256,
        colocate="lanes",
        decode_shares=[0.25],
    )
    load.on_report(
        pb.Load(running=3, waiting=2, decodes=2, decode_context=500, prefill_ms=40, free_pages=7, cached_pages=9), 1.0
    )
    one = load.candidate
    assert (one.worker_id, one.address, one.token_budget) == ("w", "w:1", 256)
    assert (one.estimator.colocation.mode, one.estimator.colocation.splits) == ("lanes", (SplitShares(0.75, 0.25),))
    assert (one.num_pages, one.page_bytes, one.free_pages, one.cached_pages) == (100, 64, 7, 9)
    assert (one.host_page_ms, one.max_num_seqs) == (0.5, 32)
    assert (one.requests, one.estimator.decodes) == (5, Work.decode(2, 500))
    assert one.queue_ms(1.0) == pytest.approx(40)
    assert one.queue_ms(1.03) == pytest.approx(10)
    assert one.queue_ms(2.0) == 0
    assert one.estimator.step_ms(Work.prefill(500)) == PerfModel(PROFILE).step_ms(Work.prefill(500))


def test_a_worker_that_sleeps_serves_when_it_promised_or_after_an_assumed_time() -> None:
    load = _worker_load()
    load.on_report(pb.Load(residency=pb.Residency(state=pb.Residency.STATE_ASLEEP)), 1.0)
    assert load.candidate.wake_ms(1.0) == load.candidate.wake_ms(9.0) == ASSUMED_WAKE_MS
    load.on_report(pb.Load(residency=pb.Residency(state=pb.Residency.STATE_DRAINING, serves_in_s=4.0)), 2.0)
    assert load.candidate.wake_ms(3.0) == pytest.approx(3000)
    assert load.candidate.wake_ms(7.0) == 0
    load.on_report(pb.Load(residency=pb.Residency(state=pb.Residency.STATE_SERVING)), 3.0)
    assert load.candidate.wake_ms(3.0) == 0


@pytest.mark.parametrize("promise", [-1.0, float("nan"), float("inf")])
def test_a_promise_that_is_no_time_is_a_protocol_error(promise: float) -> None:
    residency = pb.Residency(state=pb.Residency.STATE_WAKING, serves_in_s=promise)
    with pytest.raises(ProtocolError, match="promised to serve"):
        _worker_load().on_report(pb.Load(residency=residency), 1.0)


def test_own_requests_count_at_once_and_others_after_a_report() -> None:
    load = _worker_load()
    load.on_report(pb.Load(running=4), 0.0)
    load.sequences_started(2)
    assert load.candidate.requests == 6
    load.on_report(pb.Load(running=6), 0.1)
    assert load.candidate.requests == 6
    load.sequences_ended(1)
    assert load.candidate.requests == 5


def test_a_prompt_lengthens_the_queue_until_a_report_names_it() -> None:
    load, shared_ms = _worker_load(), PerfModel(PROFILE).step_ms(Work.prefill(1))  # of prompts that wait together
    load.on_report(pb.Load(prefill_ms=20), 0.0)
    load.prompt_sent(1, 100.0, 0.0)
    assert load.candidate.queue_ms(0.0) == pytest.approx(120 - shared_ms)
    load.on_report(pb.Load(prefill_ms=10, awaiting_first_token=[7]), 0.001)  # another router's
    assert load.candidate.queue_ms(0.001) == pytest.approx(110 - shared_ms)
    load.prompt_sent(2, 30.0, 0.002)
    load.on_report(pb.Load(prefill_ms=110, awaiting_first_token=[7, 1]), 0.003)
    assert load.candidate.queue_ms(0.003) == pytest.approx(140 - shared_ms)
    load.on_report(pb.Load(prefill_ms=140, awaiting_first_token=[2, 7, 1]), 0.004)
    assert load.candidate.queue_ms(0.004) == pytest.approx(140)


def test_overdue_prompts_do_not_lengthen_the_queue_for_a_prompt_in_time() -> None:
    load = _worker_load()
    load.on_report(pb.Load(prefill_ms=2000, overdue_ms=1500, slowdown=2.0), 0.0)
    assert load.candidate.queue_ms(0.0) == pytest.approx(1000)
    assert load.candidate.overdue_ms == pytest.approx(3000)


def test_a_prompt_that_no_report_names_expires() -> None:
    load = _worker_load()
    load.prompt_sent(1, 100.0, 0.0)
    load.on_report(pb.Load(prefill_ms=60), 2 * UNSEEN_S)
    assert load.candidate.queue_ms(2 * UNSEEN_S) == pytest.approx(60)


def test_an_answered_prompt_is_not_added_to_the_next_report() -> None:
    load = _worker_load()
    load.prompt_sent(1, 100.0, 0.0)
    load.prompt_answered(1)
    load.prompt_answered(1)
    load.on_report(pb.Load(), 0.01)
    assert load.candidate.queue_ms(0.01) == 0


def test_a_worker_is_alone_without_any_request() -> None:
    load, alone = _worker_load(), []
    changes: list[Callable[[], None]] = [
        lambda: load.on_report(pb.Load(running=1), 0.0),
        lambda: load.on_report(pb.Load(), 0.0),
        lambda: load.prompt_sent(1, 100.0, 0.0),
        lambda: load.prompt_answered(1),
        lambda: load.sequences_started(1),
    ]
    for change in changes:
        change()
        alone.append(load.candidate.alone)
    assert alone == [False, True, False, True, False]


def test_a_prompt_that_is_sent_to_an_idle_worker_begins_now() -> None:
    load = _worker_load()
    load.on_report(pb.Load(prefill_ms=5), 0.0)
    load.prompt_sent(1, 100.0, 10.0)
    assert load.candidate.queue_ms(10.05) == pytest.approx(50)


def test_without_a_profile_the_queue_follows_from_waiting_tokens() -> None:
    load = _worker_load(profile=b"")
    load.on_report(pb.Load(prefill_ms=20, overdue_ms=10, waiting_tokens=5_000), 0.0)
    assert load.candidate.estimator.colocation.model is NOMINAL
    assert load.candidate.queue_ms(0.0) == pytest.approx(5_000 * load.candidate.token_ms)
    assert load.candidate.overdue_ms == 0


def test_a_worker_slower_than_its_profile_has_longer_steps() -> None:
    load = _worker_load()
    load.on_report(pb.Load(prefill_ms=40, decodes=2, decode_context=500), 1.0)
    fast = load.candidate
    load.on_report(pb.Load(prefill_ms=40, decodes=2, decode_context=500, slowdown=1.5), 1.0)
    slow = load.candidate
    assert slow.queue_ms(1.0) == pytest.approx(1.5 * fast.queue_ms(1.0))
    assert slow.all_decode_ms == pytest.approx(1.5 * fast.all_decode_ms)
    assert slow.prefill(300, 0).ms == pytest.approx(1.5 * fast.prefill(300, 0).ms)


def test_prompts_that_wait_together_share_the_time_of_a_step() -> None:
    load = _worker_load()
    load.on_report(pb.Load(), 0.0)
    alone_ms, shared_ms = 30.0, PerfModel(PROFILE).step_ms(Work.prefill(1))
    for key in range(3):
        load.prompt_sent(key, alone_ms, 0.0)
    assert load.candidate.queue_ms(0.0) == pytest.approx(3 * alone_ms - 2 * shared_ms)
    load.on_report(pb.Load(), 0.0)  # they are still on their way
    assert load.candidate.queue_ms(0.0) == pytest.approx(3 * alone_ms - 2 * shared_ms)


def test_the_slowdown_is_limited() -> None:
    load = _worker_load()
    load.on_report(pb.Load(slowdown=1000.0), 1.0)
    assert load.candidate.estimator.slowdown == MAX_SLOWDOWN


def test_a_slow_worker_without_requests_is_tried_again() -> None:
    load = _worker_load()

    def seen(now: float, running: int) -> float:
        load.on_report(pb.Load(slowdown=2.0, running=running), now)
        return load.candidate.estimator.slowdown

    assert seen(0.0, 1) == seen(500.0, 1) == 2.0
    assert seen(500.0 + FORGET_S, 0) == pytest.approx(2 ** (1 / e))
    assert seen(500.0 + 10 * FORGET_S, 0) == pytest.approx(1.0, abs=1e-4)
    assert seen(500.0 + 10 * FORGET_S, 1) == 2.0


def test_decode_steps_are_slowed_by_the_recent_factor() -> None:
    load = _worker_load()
    streams = pb.Load(running=2, decodes=2, decode_context=500)
    load.on_report(streams, 1.0)
    alone = load.candidate
    streams.step_ms = 2.5 * alone.all_decode_ms
    load.on_report(streams, 1.0)
    slowed = load.candidate
    assert slowed.all_decode_ms == pytest.approx(2.5 * alone.all_decode_ms)
    assert slowed.grown_step_ms(1000) == pytest.approx(2.5 * alone.grown_step_ms(1000))
    assert slowed.estimator.alone_ms == alone.estimator.alone_ms
    streams.slowdown = 2.5  # all its steps take longer, not only those beside prompts
    load.on_report(streams, 1.0)
    assert load.candidate.all_decode_ms == pytest.approx(slowed.all_decode_ms)


@pytest.mark.parametrize(
    ("hello", "report", "slowdown"),
    [
        ({}, pb.Load(decodes=2, step_ms=0.01), 1 / MAX_SLOWDOWN),
        ({}, pb.Load(decodes=2, step_ms=1e6), MAX_SLOWDOWN),
        ({}, pb.Load(step_ms=1e6), 1.0),
        ({"profile": b""}, pb.Load(decodes=2, step_ms=1e6), 1.0),
        ({"profile": INSTANT}, pb.Load(decodes=2, step_ms=10), 1.0),
    ],
    ids=["bounded below", "bounded above", "long ago", "no profile", "no time"],
)
def test_the_factor_of_decode_steps_is_limited(hello: dict[str, Any], report: pb.Load, slowdown: float) -> None:
    load = _worker_load(**hello)
    load.on_report(report, 1.0)
    assert load.candidate.decode_slowdown == slowdown


@pytest.mark.parametrize("shares", [[0.0], [1.0], [float("nan")]])
def test_impossible_lane_shares_are_a_protocol_error(shares: list[float]) -> None:
    with pytest.raises(ProtocolError, match="the shares"):
        _worker_load(decode_shares=shares)


@pytest.mark.parametrize("profile", [b"x", b"{}", PROFILE.model_dump_json(by_alias=True).encode()[:-1]])
def test_a_corrupt_profile_is_a_protocol_error(profile: bytes) -> None:
    with pytest.raises(ProtocolError) as error:
        _worker_load(profile=profile)
    assert "its performance profile is not a profile" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_profile_with_absurd_times_is_a_protocol_error() -> None:
    absurd = PROFILE.model_dump_json(by_alias=True).replace("100.0", "1.7e308").encode()
    with pytest.raises(ProtocolError, match="its performance profile is not a profile"):
        _worker_load(profile=absurd)
