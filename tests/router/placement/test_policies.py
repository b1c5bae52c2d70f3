"""The policies by name, and the simple ones."""

import types
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.blocks import blocks_for
from cpd.common.errors import ConfigError
from cpd.common.policy_settings import PolicySettings
from router.placement.candidate import Candidate
from router.placement.cost_policy import CostPolicy
from router.placement.costs import PlacementQuery
from router.placement.policies import POLICIES, make_policy
from router.placement.policy import Placement, PlacementPolicy, Prompt, Situation, Targets
from router.placement.simple_policies import LONG_TOKENS, RoundRobinPolicy
from router.prefix_index.index import Prefixes
from tests.router.placement.situations import situation

WORKERS = [Candidate(name, f"{name}:1") for name in "abc"]


class LastPolicy:
    """A policy of an operator's own."""

    def __init__(self, settings: PolicySettings) -> None:
        self._inner = CostPolicy(settings)

    def place(self, seen: Situation) -> Placement:
        """Takes the last worker."""
        return self._inner.place(replace(seen, combined=seen.combined[-1:]))


NOT_CALLABLE = types.SimpleNamespace()


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_names_known_workers_and_predicts_what_it_chose(name: str) -> None:
    policy: PlacementPolicy = make_policy(PolicySettings(name=name))
    for tokens in (1, LONG_TOKENS + 1, 50_000):
        for prefill in ([], [Candidate("p", "p:1")]):
            seen = situation(Prompt(tokens, 100), WORKERS, prefill, Prefixes({"b": tokens // 32}))
            placement = policy.place(seen)
            assert placement.decode in WORKERS
            assert placement.chosen.decode == placement.decode.worker_id
            assert placement.chosen.prefill == (placement.prefill[0].worker_id if placement.prefill else "")
            assert placement.chosen.ttft_ms > 0


def test_a_policy_is_found_by_its_import_path() -> None:
    policy = make_policy(PolicySettings(name="tests.router.placement.test_policies:LastPolicy"))
    assert policy.place(situation(Prompt(10), WORKERS)).decode.worker_id == "c"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "there is no 'best'; use cost, most-cached, round-robin or module:object"),
        ("no.such.module:Policy", "No module named"),
        ("router.placement.policies:Nothing", "no attribute 'Nothing'"),
        ("tests.router.placement.test_policies:NOT_CALLABLE", "is not callable"),
    ],
)
def test_an_unknown_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(PolicySettings(name=name))


class TestMostCached:
    POLICY = make_policy(PolicySettings(name="most-cached"))

    def test_the_longest_prefix_wins_whatever_the_load(self) -> None:
        workers = [replace(WORKERS[0], requests=100), *WORKERS[1:]]
        seen = situation(Prompt(1000), workers, cached=Prefixes({"a": 20, "b": 19}))
        assert self.POLICY.place(seen).decode.worker_id == "a"
        assert not self.POLICY.place(seen).replicates_prefix

    def test_the_load_decides_among_equals(self) -> None:
        workers = [replace(one, requests=number) for one, number in zip(WORKERS, (3, 1, 2), strict=True)]
        assert self.POLICY.place(situation(Prompt(1000), workers)).decode.worker_id == "b"

    def test_long_prompts_go_to_the_prefill_worker_with_the_shortest_queue(self) -> None:
        prefill = [Candidate("p", "p:1", idle_at=5.0), Candidate("q", "q:1", idle_at=1.0)]
        long = Prompt(LONG_TOKENS + 16)
        assert [one.worker_id for one in self.POLICY.place(situation(long, WORKERS, prefill)).prefill] == ["q"]
        assert not self.POLICY.place(situation(long, WORKERS, prefill, Prefixes({"a": 1}))).prefill
        assert not self.POLICY.place(situation(long, WORKERS)).prefill
        targets = Targets(long_prefill_tokens=LONG_TOKENS + 16)
        assert not self.POLICY.place(situation(long, WORKERS, prefill, targets=targets)).prefill


class TestSleepingWorkers:
    SLEEPS = replace(WORKERS[0], serving=False)

    @pytest.mark.parametrize("name", POLICIES)
    def test_each_policy_prefers_workers_that_serve(self, name: str) -> None:
        policy = make_policy(PolicySettings(name=name))
        seen = situation(Prompt(1000, 100), [self.SLEEPS, WORKERS[1]], cached=Prefixes({"a": 60}))
        assert [policy.place(seen).decode.worker_id for _ in range(3)] == ["b"] * 3

    @pytest.mark.parametrize("name", ["most-cached", "round-robin"])
    def test_while_none_serves_requests_gather_on_the_one_that_will_first(self, name: str) -> None:
        policy = make_policy(PolicySettings(name=name))
        asleep = [replace(one, serving=False) for one in WORKERS]
        promised = [*asleep[:2], replace(asleep[2], serves_at=4.0)]
        assert [policy.place(situation(Prompt(10), promised)).decode.worker_id for _ in range(3)] == ["c"] * 3
        asked = [asleep[0], replace(asleep[1], requests=1), asleep[2]]
        assert [policy.place(situation(Prompt(10), asked)).decode.worker_id for _ in range(3)] == ["b"] * 3

    def test_a_prefill_worker_that_serves_is_preferred(self) -> None:
        prefill = [Candidate("p", "p:1", serving=False), Candidate("q", "q:1", idle_at=1.0)]
        policy, long = make_policy(PolicySettings(name="most-cached")), Prompt(LONG_TOKENS + 16)
        assert [one.worker_id for one in policy.place(situation(long, WORKERS, prefill)).prefill] == ["q"]
        assert [one.worker_id for one in policy.place(situation(long, WORKERS, prefill[:1])).prefill] == ["p"]


def test_round_robin_takes_workers_in_turn_also_when_some_are_missing() -> None:
    policy = RoundRobinPolicy(PolicySettings())

    def place(workers: list[Candidate]) -> str:
        return policy.place(situation(Prompt(10), workers)).decode.worker_id

    assert [place(WORKERS) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [place([WORKERS[0], WORKERS[2]]) for _ in range(3)] == ["c", "a", "c"]


class TestCostSettings:
    STREAMS = replace(WORKERS[0], requests=40, idle_at=1.5)

    @given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1, 1e3), st.floats(0, 10))
    def test_raising_one_target_leaves_the_weight_of_the_other(
        self, ttft_ms: float, itl_ms: float, factor: float, late: float
    ) -> None:
        def query(ttft_factor: float, itl_factor: float) -> PlacementQuery:
            targets = Targets(ttft_factor * ttft_ms, itl_factor * itl_ms)
            return PlacementQuery(situation(Prompt(10), WORKERS, targets=targets), PolicySettings())

        before, other_ttft, other_itl = query(1, 1), query(factor, 1), query(1, factor)
        assert other_ttft.itl_violation_ms(late * itl_ms) == before.itl_violation_ms(late * itl_ms)
        assert other_itl.ttft_violation_ms(late * ttft_ms) == before.ttft_violation_ms(late * ttft_ms)

    def test_a_missed_target_costs_the_set_multiple_of_itself(self) -> None:
        for ttft_ms in (1.0, 10.0):
            seen = situation(Prompt(10_000, 100), WORKERS[:1], targets=Targets(ttft_ms, 0.0))
            cost = CostPolicy(PolicySettings(ttft_miss=7.0)).place(seen).chosen.cost
            assert cost.slo_violation_ms == pytest.approx(7.0 * ttft_ms)

    def test_the_gap_weight_multiplies_the_delays_of_later_tokens(self) -> None:
        seen = situation(Prompt(3000, 100), [self.STREAMS], [Candidate("p", "p:1")])
        for option in CostPolicy(PolicySettings(gap_weight=3.0)).place(seen).options:
            cost = option.cost
            assert option.gaps_ms == pytest.approx(
                cost.first_gap_ms + cost.decode_ms + cost.interference_ms + cost.stall_ms
            )
            assert option.cost_ms == pytest.approx(sum(cost) + 2 * option.gaps_ms)

    def test_an_eviction_costs_as_much_as_its_pages_are_likely_wanted_again(self) -> None:
        seen = situation(Prompt(3000, 100), [self.STREAMS])
        rare, usual = (
            CostPolicy(PolicySettings()).place(replace(seen, evicted_reuse=reuse)).chosen.cost.eviction_ms
            for reuse in (0.2, 0.6)
        )
        assert usual == pytest.approx(3 * rare)
        assert rare > 0

    def test_only_pages_beyond_the_empty_ones_are_evicted(self) -> None:
        pages = blocks_for(3000)
        costs = [
            CostPolicy(PolicySettings())
            .place(situation(Prompt(3000, 100), [replace(self.STREAMS, free_pages=free)]))
            .chosen.cost.eviction_ms
            for free in (0, pages // 2, pages, 10 * pages)
        ]
        assert costs[1] == pytest.approx(costs[0] / 2)
        assert costs[2:] == [0.0, 0.0]

    def test_without_fetches_no_prefix_source_is_considered(self) -> None:
        seen = situation(Prompt(4000, 10), [self.STREAMS, WORKERS[1]], cached=Prefixes({"a": 240}))
        for fetches in (True, False):
            options = CostPolicy(PolicySettings(prefix_fetches=fetches)).place(seen).options
            assert any(option.prefix_source for option in options) == fetches
