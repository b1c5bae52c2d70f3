"""What a router learns from first tokens, gaps and answers."""

import logging
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from cpd.common.policy_settings import PolicySettings
from cpd.rpc import cpd_pb2 as pb
from router.placement.cost_policy import CostPolicy
from router.placement.costs import placement_of
from router.placement.learning import ANSWERS, FORGET_S, MAX_FACTOR, PROMPTS, Learning
from router.placement.policy import Placement, Prompt
from router.placement.worker_load import WorkerLoad
from router.prefix_index.index import Prefixes
from tests.router.placement.situations import situation
from tests.router.placement.test_worker_load import INSTANT, PROFILE

SETTINGS = PolicySettings()


def _load(learning: Learning | None = None, **hello: Any) -> WorkerLoad:
    profile = PROFILE.model_dump_json(by_alias=True).encode()
    hello = {"worker_id": "w", "profile": profile, **hello}
    errors = (learning or Learning(SETTINGS, 2000.0)).worker(prefills_only=hello.get("role") == pb.ROLE_PREFILL)
    load = WorkerLoad(pb.Hello(**hello), "w:1", itl_ms=50.0, errors=errors)
    load.on_report(pb.Load(), 0.0)
    return load


def _placement(load: WorkerLoad, tokens: int) -> Placement:
    seen = situation(Prompt(tokens, 100), [load.candidate], now=1e6)  # nothing waits any more
    return placement_of(seen, SETTINGS, load.candidate)


def _serve(
    load: WorkerLoad, actual_ms: Callable[[int], float], count: int = 200, sizes: tuple[int, ...] = (20, 2000, 6000)
) -> None:
    """Serves prompts of these sizes, five a second, and learns from them."""
    learning, rng = Learning(SETTINGS, 2000.0), Random(0)
    for now in np.arange(count) / 5:
        tokens = rng.choice(sizes)
        learning.first_token(load.errors, _placement(load, tokens), actual_ms(tokens), now)
        load.on_report(pb.Load(), now)


@pytest.mark.parametrize(("factor", "overhead_ms"), [(3.0, 0.0), (1 / 3, 0.0), (1.0, 15.0), (2.0, 8.0), (1.0, 0.0)])
def test_the_worker_factor_and_the_overhead_are_told_apart(factor: float, overhead_ms: float) -> None:
    load, truth = _load(), _load()
    _serve(load, lambda tokens: factor * _placement(truth, tokens).chosen.ttft_ms + overhead_ms)
    for tokens in (20, 1000, 6000):
        actual_ms = factor * _placement(truth, tokens).chosen.ttft_ms + overhead_ms
        assert _placement(load, tokens).chosen.ttft_ms == pytest.approx(actual_ms, rel=0.15, abs=1.0)
    assert load.candidate.ttft_factor == pytest.approx(factor, rel=0.15)


def test_the_remote_route_begins_with_the_set_handoff() -> None:
    assert _load(role=pb.ROLE_PREFILL).candidate.overhead_ms == pytest.approx(2.0)
    assert _load(role=pb.ROLE_COMBINED).candidate.overhead_ms == 0.0


def test_noise_of_both_signs_changes_little() -> None:
    load, truth, rng = _load(), _load(), Random(1)
    _serve(load, lambda tokens: rng.choice([0.7, 1.3]) * _placement(truth, tokens).chosen.ttft_ms, 200)
    assert load.candidate.ttft_factor == pytest.approx(1.0, abs=0.2)


def test_one_outlier_changes_little() -> None:
    load = _load()
    _serve(load, lambda _: 1e9, 1, (900,))
    assert load.candidate.ttft_factor < 1.3


def test_figures_are_limited() -> None:
    load = _load()
    learning = Learning(SETTINGS, 1e12)
    for _ in range(500):
        learning.first_token(load.errors, _placement(load, 900), 1e9, 0.0)
        load.on_report(pb.Load(), 0.0)
    assert load.candidate.ttft_factor == pytest.approx(MAX_FACTOR)


def test_short_prompts_that_wait_for_steps_do_not_make_long_ones_look_slow() -> None:
    load, rng = _load(), Random(2)
    _serve(load, lambda _: rng.choice([30.0, 90.0, 900.0]), 300, (100, 300, 400))
    assert load.candidate.ttft_factor < 2.5
    assert load.candidate.overhead_ms > 30


def test_a_worker_without_requests_is_expected_to_be_like_the_others() -> None:
    learning = Learning(SETTINGS, 2000.0)
    busy, idle = _load(learning), _load(learning)
    for now in np.arange(300) / 5:
        load = busy
        learning.first_token(load.errors, _placement(load, 500), _placement(_load(), 500).chosen.ttft_ms / 3, now)
        for one in (busy, idle):
            one.on_report(pb.Load(), now)
    assert busy.candidate.ttft_factor < 0.45
    assert idle.candidate.ttft_factor == pytest.approx(busy.candidate.ttft_factor, rel=0.1)


def test_a_worker_that_was_slow_once_is_forgiven() -> None:
    learning = Learning(SETTINGS, 2000.0)
    slow, others = _load(learning), [_load(learning) for _ in range(3)]
    for now in range(120):
        for load in (slow, *others) if now < 20 else others:
            actual_ms = _placement(_load(), 4000).chosen.ttft_ms * (3 if load is slow else 1)
            learning.first_token(load.errors, _placement(load, 4000), actual_ms, now)
            load.on_report(pb.Load(), now)
        if now == 20:
            slow.on_report(pb.Load(), now)
            assert slow.candidate.ttft_factor > 1.8
    slow.on_report(pb.Load(), 120 + 3 * FORGET_S)
    assert slow.candidate.ttft_factor == pytest.approx(1.0, abs=0.15)


def test_a_prompt_alone_is_predicted_by_those_that_were_alone() -> None:
    learning = Learning(SETTINGS, 2000.0)
    load, other = _load(learning), _load(learning)

    def learn(factor: float, now: float, *, alone: bool) -> None:
        load.sequences_started(not alone)
        assert load.candidate.alone is alone
        actual_ms = factor * _placement(_load(), 4000).chosen.ttft_ms
        learning.first_token(load.errors, _placement(load, 4000), actual_ms, now)
        load.sequences_ended(not alone)
        load.on_report(pb.Load(), now)

    for now in range(60):
        learn(2.0, now, alone=False)
    assert load.candidate.ttft_factor > 1.7  # nothing else is known
    for now in range(60, 120):
        learn(1.0, now, alone=True)
        learn(2.0, now, alone=False)
    for one in (load, other):
        one.on_report(pb.Load(), 120.0)
        assert one.candidate.ttft_factor == pytest.approx(1.0, abs=0.1)
    load.sequences_started(1)
    assert load.candidate.ttft_factor > 1.4


class TestWhatWaitsBehindAPrefill:
    """Two combined workers and a prefill worker."""

    def _arrive(self, learning: Learning, count: int, *, queue_ms: float, per_s: float, tokens: int = 500) -> float:
        """Places prompts on a combined worker, which has a queue; the other workers have none. Returns the time."""
        names = {"a": pb.ROLE_COMBINED, "b": pb.ROLE_COMBINED, "p": pb.ROLE_PREFILL}
        a, b, p = (_load(learning, worker_id=name, role=role).candidate for name, role in names.items())
        now = 0.0
        for number in range(count):
            now = 1 + number / per_s
            a.idle_at = now + queue_ms / 1e3
            seen = situation(Prompt(tokens, 100), [a, b], [p], now=now)
            learning.placed(seen, placement_of(seen, SETTINGS, a))
        return now

    def test_it_is_assumed_before_there_were_prompts(self) -> None:
        assert Learning(SETTINGS, 2000.0).behind_combined(0.0).number(100.0, 100.0) == SETTINGS.queued_behind

    def test_it_follows_from_arrivals_and_idle_time(self) -> None:
        learning = Learning(SETTINGS, 2000.0)
        now = self._arrive(learning, 1000, queue_ms=100.0, per_s=20.0)
        # 10 prompts a second for each worker, and one of two is busy
        assert learning.behind_combined(now).number(300.0, 400.0) == pytest.approx(10 * 0.5 / 0.5, rel=0.05)
        assert learning.behind_prefill(now).number(300.0, 400.0) == SETTINGS.queued_behind
        assert learning.behind_combined(now + 100).number(300.0, 400.0) == pytest.approx(0.0, abs=0.01)

    def test_prompts_that_are_late_anyway_do_not_count(self) -> None:
        learning = Learning(SETTINGS, 2000.0)
        now = self._arrive(learning, 100, queue_ms=3000.0, per_s=20.0)
        assert learning.behind_combined(now).number(300.0, 400.0) == SETTINGS.queued_behind


def test_prompts_that_are_late_anyway_teach_nothing() -> None:
    load = _load()
    Learning(SETTINGS, 10.0).first_token(load.errors, _placement(load, 900), 1e6, 0.0)
    load.on_report(pb.Load(), 0.0)
    assert (load.candidate.ttft_factor, load.candidate.overhead_ms, load.errors.count) == (1.0, 0.0, 1)


def test_a_worker_that_claims_to_take_no_time_gets_its_share_again() -> None:
    """Its profile is all zeros, so that no factor can correct it: the overhead does."""
    learning, policy, chosen = Learning(SETTINGS, 2000.0), CostPolicy(SETTINGS), []
    loads = {
        "liar": _load(learning, worker_id="liar", profile=INSTANT),
        "honest": _load(learning, worker_id="honest"),
    }
    for now in range(60):
        for load in loads.values():
            load.on_report(pb.Load(), now)
        workers = [load.candidate for load in loads.values()]
        placement = policy.place(situation(Prompt(500, 1), workers, now=now, seed=now))
        name = placement.decode.worker_id
        chosen.append(name)
        actual_ms = 600.0 if name == "liar" else 50.0
        learning.first_token(loads[name].errors, placement, actual_ms, now)
    assert chosen[0] == "liar"
    assert chosen[20:].count("honest") > 30


def test_output_lengths_are_those_of_the_tenant() -> None:
    learning = Learning(PolicySettings(expected_output=256), 2000.0)
    assert learning.expected_output("a") == 256
    for _ in range(ANSWERS):
        learning.answer("a", 10)
    assert (learning.expected_output("a"), learning.expected_output("b")) == (10, 256)
    for _ in range(4 * ANSWERS):
        learning.answer("a", 100)
    assert learning.expected_output("a") == pytest.approx(100, abs=3)


def test_an_evicted_page_is_as_likely_wanted_again_as_recent_prompts_were_cached() -> None:
    learning = Learning(PolicySettings(evicted_reuse=0.25), 2000.0)
    assert learning.evicted_reuse == 0.25
    for _ in range(8 * PROMPTS):
        learning.prompt(1000, 900)
        learning.prompt(3000, 300)
    assert learning.evicted_reuse == pytest.approx(0.3, abs=0.01)  # long prompts count more
    for _ in range(8 * PROMPTS):
        learning.prompt(1000, 0)
    assert learning.evicted_reuse < 0.01


def test_wrong_predictions_are_not_used_until_they_are_right_again(caplog: pytest.LogCaptureFixture) -> None:
    learning, load = Learning(SETTINGS, 2000.0), _load()
    placement = _placement(load, 500)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            learning.first_token(_load().errors, placement, 50 * placement.chosen.ttft_ms, 0.0)
        assert not learning.trusted
        for _ in range(100):
            learning.first_token(_load().errors, placement, placement.chosen.ttft_ms, 0.0)
    assert [learning.trusted, *(record.levelname for record in caplog.records)] == [True, "WARNING", "WARNING"]


def test_the_fallback_takes_the_most_cached_worker() -> None:
    busy, idle = _load().candidate, _load(worker_id="v").candidate
    seen = situation(Prompt(1000, 10), [idle, busy], cached=Prefixes({"w": 1}), trusted=False)
    assert CostPolicy(SETTINGS).place(seen).decode.worker_id == "w"
