from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.policy_settings import PolicySettings
from cpd.performance.colocation import Colocation, Mode, PrefillEstimator
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, TransferProfile, Work
from cpd.performance.split import SplitShares
from router.placement.candidate import ASSUMED_WAKE_MS, Candidate
from router.placement.cost_policy import CostPolicy
from router.placement.costs import PlacementQuery
from router.placement.policy import Placement, Prompt, QueuedBehind, Targets
from router.prefix_index.index import Prefixes
from tests.router.placement.situations import situation


def _model(ms_per_token: float = 0.05, base_ms: float = 8.0) -> PerfModel:
    """A model with 20,000 prefill tokens a second, and decode steps of 8 ms plus 0.05 ms for each stream."""
    decode = StepCost(tokens=(1, 8192), tokens_ms=(base_ms, base_ms + 8192 * 0.05))
    prefill = StepCost(tokens=(1, 8192), tokens_ms=(base_ms, base_ms + 8192 * ms_per_token))
    whole = ShareProfile(share=1.0, decode=decode, prefill=prefill)
    return PerfModel(
        Profile(
            schema="cpd-profile/1",
            source="roofline",
            device="d",
            model="m",
            shares=(whole,),
            transfer=TransferProfile(fixed_ms=0.2, bytes_per_ms=45e6),
        )
    )


MODEL = _model()


def _worker(name: str, *, streams: int = 0, queue_ms: float = 0.0, **fields: Any) -> Candidate:
    worker = Candidate(
        worker_id=name,
        address=f"{name}:1",
        estimator=_estimator(streams),
        page_bytes=2 << 20,
        num_pages=40_000,
        free_pages=0,
        cached_pages=35_000,
        idle_at=queue_ms / 1e3,
        requests=streams,
    )
    return replace(worker, **fields)


def _estimator(streams: int, *, itl_ms: float = 50.0, budget: int = 0, mode: Mode = "mixed") -> PrefillEstimator:
    splits = [SplitShares(1 - share, share) for share in (0.25, 0.5)]
    rule = Colocation(MODEL, token_budget=budget, mode=mode, splits=splits, itl_ms=itl_ms)
    return PrefillEstimator(rule, Work.decode(streams, streams * 1000))


def _place(
    tokens: int,
    combined: list[Candidate],
    prefill: list[Candidate] | None = None,
    cached: dict[str, int] | None = None,
    seed: int = 0,
    in_pages: dict[str, int] | None = None,
    policy: PolicySettings | None = None,
    **asked: Any,
) -> Placement:
    prompt, prefixes = Prompt(tokens, output_tokens=200), Prefixes(cached or {}, in_pages or {})
    seen = situation(prompt, combined, prefill or [], prefixes, Targets(**asked), seed=seed)
    return CostPolicy(policy or PolicySettings(gap_weight=1.0)).place(seen)


def _decode(placement: Placement) -> str:
    return placement.decode.worker_id


class TestRoute:
    def test_a_short_prompt_stays_on_an_idle_worker(self) -> None:
        assert not _place(64, [_worker("d")], [_worker("p")]).prefill

    def test_a_cold_prompt_beside_many_streams_goes_remote(self) -> None:
        placement = _place(4096, [_worker("d", streams=64)], [_worker("p")])
        assert [one.worker_id for one in placement.prefill] == ["p"]

    def test_the_same_prompt_stays_where_it_is_cached(self) -> None:
        placement = _place(4096, [_worker("d", streams=64)], [_worker("p")], {"d": 255})
        assert not placement.prefill

    def test_an_idle_combined_worker_is_better_than_a_busy_prefill_worker(self) -> None:
        assert not _place(4096, [_worker("d")], [_worker("p", queue_ms=500)]).prefill

    def test_a_long_queue_of_the_prefill_workers_sends_prompts_beside_streams(self) -> None:
        streams = _worker("d", streams=8)
        assert _place(1024, [streams], [_worker("p", queue_ms=0)]).prefill
        assert not _place(1024, [streams], [_worker("p", queue_ms=1500)]).prefill

    def test_a_burst_of_prompts_spares_the_streams_while_the_prefill_workers_keep_the_slo(self) -> None:
        combined = [_worker(f"d{i}", streams=32) for i in range(4)]
        prefill_workers = {f"p{i}": _worker(f"p{i}") for i in range(4)}
        for _ in range(16):
            placement = _place(4096, combined, list(prefill_workers.values()))
            name = placement.chosen.prefill
            queue_ms = placement.chosen.cost.wait_ms + placement.chosen.cost.prefill_ms
            prefill_workers[name] = replace(prefill_workers[name], idle_at=queue_ms / 1e3)

    def test_overdue_prompts_do_not_delay_a_prompt_that_can_be_in_time(self) -> None:
        placement = _place(4096, [_worker("d", streams=64)], [_worker("p", overdue_ms=9000.0)])
        assert placement.prefill
        assert placement.chosen.cost.wait_ms == 0

    def test_an_overdue_prompt_waits_for_other_overdue_ones(self) -> None:
        prefill_workers = [
            _worker("p", queue_ms=1990, overdue_ms=9000.0),
            _worker("q", queue_ms=2500, overdue_ms=1000.0),
        ]
        placement = _place(4096, [_worker("d", streams=64, queue_ms=9000)], prefill_workers)
        assert placement.chosen.prefill == "q"
        assert placement.chosen.cost.wait_ms == pytest.approx(3500)

    def test_a_late_prompt_waits_where_it_takes_nobodys_time(self) -> None:
        combined, prefill_worker = _worker("d", streams=64, queue_ms=2500), _worker("p", queue_ms=9000)
        placement = _place(8192, [combined], [prefill_worker])
        assert placement.prefill
        assert placement.chosen.cost.queued_behind_ms == 0
        assert placement.chosen.cost.late_ms < -6000

    def test_a_long_prompt_leaves_a_busy_worker_to_the_many_short_ones(self) -> None:
        def goes_remote(tokens: int, per_ms: float) -> bool:
            prompt, late = Prompt(tokens, output_tokens=200), _worker("p", queue_ms=4000)
            seen = situation(prompt, [_worker("d", streams=8)], [late])
            seen.behind_combined = QueuedBehind(0.0, per_ms)
            return bool(CostPolicy(PolicySettings()).place(seen).prefill)

        few, many = 0.001, 0.3
        assert not goes_remote(20_000, few)
        assert goes_remote(20_000, many)
        assert not goes_remote(1000, many)

    def test_prefill_workers_are_chosen_by_their_own_cache_and_queue(self) -> None:
        prefill_workers = [_worker("busy", queue_ms=400), _worker("warm", queue_ms=30), _worker("idle")]
        placement = _place(4096, [_worker("d", streams=64)], prefill_workers, {"warm": 200})
        assert [one.worker_id for one in placement.prefill] == ["warm", "idle", "busy"]

    def test_a_number_forces_the_threshold(self) -> None:
        placement = _place(100, [_worker("d")], [_worker("p")], long_prefill_tokens=99)
        assert placement.prefill
        assert placement.long_prefill_tokens == 99
        assert not _place(8000, [_worker("d", streams=99)], [_worker("p")], long_prefill_tokens=8000).prefill
        assert not _place(8000, [_worker("d")], [], long_prefill_tokens=0).prefill

    def test_the_break_even_lets_the_decode_worker_compute_what_would_not_go_remote(self) -> None:
        worker, prefill_worker = _worker("d", streams=16), _worker("p")
        placement = _place(8192, [worker], [prefill_worker])
        threshold = placement.long_prefill_tokens
        assert 0 <= threshold < 8192
        for cached, remote in ((0, True), ((8192 - threshold) // BLOCK_SIZE + 8, False)):
            assert bool(_place(8192, [worker], [prefill_worker], {"d": cached}).prefill) == remote


class TestLatencyTargets:
    def test_a_prompt_avoids_a_queue_that_would_violate_its_slo(self) -> None:
        workers = [_worker("warm", queue_ms=2600), _worker("cold", queue_ms=500)]
        assert _decode(_place(2048, workers, cached={"warm": 127}, slo_ttft_ms=60_000)) == "cold"
        assert _decode(_place(2048, [_worker("warm", queue_ms=300), workers[1]], cached={"warm": 127})) == "warm"

    def test_streams_that_would_violate_their_slo_count(self) -> None:
        # both gaps would be longer, only one too long
        worker, prefill_worker = (
            _worker("d", streams=2, estimator=_estimator(2, itl_ms=112.5)),
            _worker("p", queue_ms=300),
        )
        assert not _place(2048, [worker], [prefill_worker], slo_itl_ms=200).prefill
        assert _place(2048, [worker], [prefill_worker], slo_itl_ms=50).prefill

    def test_a_batch_at_its_limit_takes_no_more_streams(self) -> None:
        full, other = _worker("full", streams=830), _worker("other", streams=780)
        assert _decode(_place(160, [full, other], cached={"full": 9}, slo_itl_ms=50)) == "other"


class TestBatchSlots:
    """A worker has a limited number of batch slots."""

    FULL = _worker("full", streams=64, requests=96, max_num_seqs=64)

    def test_a_request_to_a_full_worker_waits_until_enough_others_end(self) -> None:
        chosen = _place(100, [self.FULL]).chosen
        assert chosen.cost.wait_ms == pytest.approx(33 / 64 * 256 * MODEL.step_ms(Work.decode(64, 64_000)))
        assert _place(100, [replace(self.FULL, requests=63)]).chosen.cost.wait_ms == 0
        assert _place(100, [replace(self.FULL, max_num_seqs=0)]).chosen.cost.wait_ms == 0

    def test_a_short_prompt_that_overtakes_a_long_one_still_waits_for_a_batch_slot(self) -> None:
        busy = _worker("d", queue_ms=900, estimator=_estimator(24, mode="auto"), requests=25, max_num_seqs=32)
        assert _place(10, [busy]).chosen.cost.wait_ms < 100
        assert _place(10, [replace(busy, requests=60)]).chosen.cost.wait_ms > 1000

    def test_a_session_leaves_a_full_worker_for_one_with_room(self) -> None:
        roomy = _worker("roomy", streams=64, max_num_seqs=128)
        cached = {"full": 60}
        assert _decode(_place(1000, [self.FULL, roomy], cached=cached)) == "roomy"
        assert _decode(_place(1000, [replace(self.FULL, requests=63), roomy], cached=cached)) == "full"

    def test_a_remote_prefill_still_waits_for_a_batch_slot(self) -> None:
        option = next(one for one in _place(4096, [self.FULL], [_worker("p")]).options if one.prefill)
        assert option.cost.wait_ms == _place(100, [self.FULL]).chosen.cost.wait_ms


class TestCache:
    def test_a_session_stays_where_its_cache_is(self) -> None:
        workers = [_worker("home", streams=4), _worker("other", streams=4), _worker("third", streams=4)]
        assert {_decode(_place(2000, workers, cached={"home": 100}, seed=seed)) for seed in range(20)} == {"home"}

    def test_a_few_cached_blocks_decide_among_near_equals(self) -> None:
        workers = [_worker("home"), _worker("other")]
        assert {_decode(_place(40, workers, cached={"home": 1}, seed=seed)) for seed in range(20)} == {"home"}

    def test_a_hot_prefix_is_copied_when_its_worker_is_crowded(self) -> None:
        home, other = _worker("home", streams=2), _worker("other", streams=2)
        assert not _place(1024, [home, other], cached={"home": 63}).replicates_prefix
        crowded = replace(home, requests=80, estimator=_estimator(80))
        placement = _place(1024, [crowded, other], cached={"home": 63})
        assert (_decode(placement), placement.replicates_prefix) == ("other", True)

    def test_a_session_does_not_move_for_a_slightly_lower_load(self) -> None:
        home, other = _worker("home", streams=110), _worker("other", streams=100)
        assert _decode(_place(2000, [home, other], cached={"home": 120})) == "home"
        home, other = (replace(one, host_page_ms=0.05) for one in (home, other))  # from where they are loaded quickly
        assert _decode(_place(2000, [home, other], cached={"home": 120})) == "other"

    def test_a_burst_of_one_prefix_spreads(self) -> None:
        workers = {name: _worker(name) for name in ("home", "b", "c", "d")}
        for _ in range(100):
            name = _decode(_place(1024, list(workers.values()), cached={"home": 63}))
            workers[name] = replace(workers[name], requests=workers[name].requests + 1)
        counts = [one.requests for one in workers.values()]
        assert max(counts) < 3 * min(counts)

    def test_a_worker_that_would_have_to_wait_for_memory_is_avoided(self) -> None:
        full = _worker("full", free_pages=3, cached_pages=5)
        assert _decode(_place(1000, [full, _worker("b", streams=10)])) == "b"

    def test_a_session_returns_to_its_cache_on_the_remote_route_too(self) -> None:
        workers = [_worker("other", streams=60), _worker("home", streams=62)]
        placement = _place(6000, workers, [_worker("p")], {"home": 250, "p": 250})
        assert placement.prefill
        assert _decode(placement) == "home"


class TestHostMemory:
    """The last cached blocks of a worker are only in host memory."""

    def test_it_is_worth_less_than_pages_and_more_than_nothing(self) -> None:
        workers = [_worker(name, host_page_ms=0.05) for name in ("cold", "host", "pages")]
        placement = _place(2048, workers, cached={"host": 120, "pages": 120}, in_pages={"host": 20})
        assert _decode(placement) == "pages"
        options = {one.decode: one for one in placement.options if not one.prefix_source}
        pages, host, cold = (options[name] for name in ("pages", "host", "cold"))
        assert [one.host_tokens for one in (pages, host, cold)] == [0, 1600, 0]
        assert [one.uncached_tokens for one in (pages, host, cold)] == [128, 128, 2048]
        assert host.cost.wait_ms == pytest.approx(100 * 0.05)
        assert host.ttft_ms == pytest.approx(pages.ttft_ms + host.cost.wait_ms)
        assert _decode(_place(2048, workers[:2], cached={"host": 120}, in_pages={"host": 20})) == "host"

    @pytest.mark.parametrize(("host_page_ms", "host_tokens"), [(0.7, 1600), (0.9, 0)])  # computing a page takes 0.8 ms
    def test_it_counts_if_copying_is_faster_than_computing(self, host_page_ms: float, host_tokens: int) -> None:
        worker = _worker("host", host_page_ms=host_page_ms)
        chosen = _place(2048, [worker], cached={"host": 120}, in_pages={"host": 20}).chosen
        assert chosen.host_tokens == host_tokens
        assert chosen.uncached_tokens == 2048 - 20 * BLOCK_SIZE - host_tokens
        assert chosen.cost.wait_ms == pytest.approx(host_page_ms * host_tokens / BLOCK_SIZE)

    def test_a_prefill_worker_computes_the_rest(self) -> None:
        prefill_workers = [_worker("p", host_page_ms=0.05), _worker("q")]
        placement = _place(4096, [_worker("d", streams=64)], prefill_workers, {"p": 200}, in_pages={"p": 0})
        assert (placement.chosen.prefill, placement.chosen.host_tokens) == ("p", 3200)
        assert placement.chosen.cost.wait_ms == pytest.approx(200 * 0.05)

    def test_loaded_pages_are_not_transferred_but_take_up_pages(self) -> None:
        prefill_worker = _worker("p")
        for in_pages, free_pages, lacking in ((0, 400, False), (0, 250, True), (200, 250, False)):
            worker = _worker("d", streams=64, host_page_ms=0.05, free_pages=free_pages, cached_pages=0)
            placement = _place(4096, [worker], [prefill_worker], {"d": 200}, in_pages={"d": in_pages})
            remote = next(one for one in placement.options if one.prefill)
            assert (remote.cost_ms > 100_000) == lacking

    def test_another_worker_loads_its_blocks_before_they_are_fetched(self) -> None:
        home, other = replace(TestPrefix.HOME, host_page_ms=0.05), _worker("other")
        fetched = [
            _place(1024, [home, other], cached={"home": 60}, in_pages=in_pages).chosen
            for in_pages in ({}, {"home": 10})
        ]
        assert [(one.decode, one.prefix_source, one.host_tokens) for one in fetched] == [
            ("other", "home", 0),
            ("other", "home", 800),
        ]
        assert fetched[1].cost.wait_ms == pytest.approx(fetched[0].cost.wait_ms + 50 * 0.05)


class TestPrefix:
    """A prefix that another combined worker has cached."""

    HOME = _worker("home", streams=80)

    def test_it_is_fetched_if_its_worker_is_busy(self) -> None:
        placement = _place(1024, [self.HOME, _worker("other")], cached={"home": 60})
        assert (_decode(placement), placement.route) == ("other", "local")
        assert placement.prefix_source == self.HOME
        chosen = placement.chosen
        assert (chosen.prefix_source, chosen.prefill, chosen.uncached_tokens) == ("home", "", 1024 - 60 * BLOCK_SIZE)
        assert chosen.cost.wait_ms == pytest.approx(60 * (2 << 20) / 45e6 + 0.2, abs=3)
        assert chosen.uncached_tokens < placement.long_prefill_tokens < 1024

    def test_it_is_fetched_while_the_prompt_waits(self) -> None:
        placement = _place(1024, [self.HOME, _worker("other", queue_ms=40)], cached={"home": 60})
        assert (placement.chosen.prefix_source, placement.chosen.cost.wait_ms) == ("home", 40)

    def test_it_is_computed_if_that_is_faster(self) -> None:
        slow = Colocation(PerfModel(MODEL.profile.model_copy(update={"transfer": TransferProfile(bytes_per_ms=1e6)})))
        placement = _place(1024, [self.HOME, _worker("other", estimator=PrefillEstimator(slow))], cached={"home": 60})
        assert (_decode(placement), placement.prefix_source, placement.chosen.uncached_tokens) == ("other", None, 1024)

    def test_it_is_used_in_place_if_its_worker_is_idle(self) -> None:
        placement = _place(1024, [_worker("home"), _worker("other")], cached={"home": 60})
        assert (_decode(placement), placement.prefix_source) == ("home", None)

    def test_only_missing_blocks_are_fetched(self) -> None:
        placement = _place(1024, [self.HOME, _worker("other")], cached={"home": 60, "other": 60})
        assert (_decode(placement), placement.prefix_source) == ("other", None)

    def test_a_number_forces_the_threshold_on_the_rest(self) -> None:
        workers = [self.HOME, _worker("other")]
        placement = _place(1024, workers, [_worker("p")], {"home": 60}, long_prefill_tokens=64)
        assert (_decode(placement), placement.route, placement.prefix_source) == ("other", "local", self.HOME)
        assert placement.long_prefill_tokens > 64
        assert _place(1024, workers, [_worker("p")], {"home": 60}, long_prefill_tokens=63).route == "remote"


class TestBalance:
    """A worker with more than its share of all requests."""

    OTHERS = tuple(_worker(f"w{i}", streams=20) for i in range(4))

    @pytest.mark.parametrize(("streams", "blocks", "stays"), [(21, 20, True), (24, 20, False), (24, 400, True)])
    def test_it_keeps_sessions_if_their_cache_saves_more(self, streams: int, blocks: int, stays: bool) -> None:
        workers = [_worker("home", streams=streams), *(replace(one, page_bytes=1 << 30) for one in self.OTHERS)]
        placement = _place(blocks * BLOCK_SIZE + 16, workers, cached={"home": blocks})
        assert (_decode(placement) == "home") == stays

    @pytest.mark.parametrize(("streams", "goes"), [(21, True), (28, False)])
    def test_it_gets_no_streams_for_a_slightly_higher_speed(self, streams: int, goes: bool) -> None:
        workers = [_worker("calm", streams=streams), *(replace(one, decode_slowdown=1.3) for one in self.OTHERS)]
        assert (_decode(_place(16, workers)) == "calm") == goes

    @pytest.mark.parametrize("streams", [0, 1])
    def test_a_few_requests_are_not_balanced(self, streams: int) -> None:
        workers = [_worker("home", streams=streams), *(_worker(f"w{i}") for i in range(4))]
        assert _decode(_place(32 * BLOCK_SIZE, workers, cached={"home": 30})) == "home"

    @pytest.mark.parametrize(("streams", "cost"), [(19, False), (24, True)])
    def test_the_share_of_a_faster_worker_is_larger(self, streams: int, cost: bool) -> None:
        # the fast worker needs two thirds of the time: its share is 3/5, plus 10 %
        slow = _worker(
            "slow", estimator=PrefillEstimator(Colocation(MODEL), Work.decode(12, 12_000), slowdown=1.5), requests=12
        )
        fast = _worker("fast", streams=streams)
        query = PlacementQuery(situation(Prompt(16, 200), [fast, slow]), PolicySettings())
        assert query.imbalance_ms(slow) == 0
        assert (query.imbalance_ms(fast) > 0) == cost


def test_a_stream_avoids_a_worker_whose_prefills_slow_down_its_steps() -> None:
    busy, calm = _worker("busy", streams=8, decode_slowdown=2.5), _worker("calm", streams=12)
    assert _decode(_place(16, [busy, calm])) == "calm"
    assert _decode(_place(16, [replace(busy, decode_slowdown=1.0), calm])) == "busy"


def test_equals_are_chosen_at_random() -> None:
    workers = [_worker(f"w{i}") for i in range(40)]
    assert len({_decode(_place(100, workers, seed=seed)) for seed in range(400)}) == 40


def test_near_equals_with_fewer_requests_are_chosen_more_often() -> None:
    instant = PrefillEstimator(Colocation(PerfModel(Profile.load("instant"))))
    workers = [_worker(f"w{i}", estimator=instant, requests=8 + i) for i in range(4)]
    chosen = Counter(_decode(_place(100, workers, seed=seed)) for seed in range(300))
    assert chosen["w0"] > chosen["w1"] > chosen["w2"] > chosen["w3"] == 0


def test_a_worker_without_a_profile_can_be_placed_on() -> None:
    """A worker without a profile, with the default token budget and without pages."""
    mute, busy = Candidate("mute", "mute:1"), Candidate("busy", "busy:1", requests=9, idle_at=0.5)
    placement = _place(2000, [mute, busy], [Candidate("p", "p:1")])
    assert _decode(placement) == "mute"
    assert _decode(_place(2000, [mute, replace(busy, requests=0, idle_at=0.0)], cached={"busy": 100})) == "busy"


def test_the_chosen_option_comes_first() -> None:
    placement = _place(4096, [_worker("a", streams=64), _worker("b", streams=60)], [_worker("p", queue_ms=10)])
    chosen, *others = placement.options
    assert chosen == placement.chosen
    assert (chosen.decode, chosen.prefill) == ("b", "p")
    assert chosen.cost.wait_ms == pytest.approx(10)
    assert chosen.cost.prefill_ms == pytest.approx(2 * 8 + 4096 * 0.05, rel=0.01)
    assert chosen.ttft_ms == pytest.approx(chosen.cost.wait_ms + chosen.cost.prefill_ms, abs=5)
    assert chosen.cost.first_gap_ms > 2048 * (2 << 20) / BLOCK_SIZE / 45e6
    assert {(one.decode, one.prefill) for one in others} == {("b", ""), ("a", "p"), ("a", "")}


_CANDIDATES = st.builds(
    lambda streams, queue_ms, free, budget, mode: _worker(
        "x",
        streams=streams,
        queue_ms=queue_ms,
        free_pages=free,
        estimator=_estimator(streams, budget=budget, mode=mode),
    ),
    st.integers(0, 200),
    st.floats(0, 5000),
    st.integers(0, 3000),
    st.sampled_from([0, 256, 2048, 8192]),
    st.sampled_from(["mixed", "lanes", "auto"]),
)


def _named(candidates: list[Candidate], prefix: str) -> list[Candidate]:
    return [replace(one, worker_id=f"{prefix}{number}") for number, one in enumerate(candidates)]


_FLEETS = st.tuples(
    st.lists(_CANDIDATES, min_size=1, max_size=12).map(lambda some: _named(some, "d")),
    st.lists(_CANDIDATES, max_size=6).map(lambda some: _named(some, "p")),
    st.dictionaries(st.sampled_from([f"{kind}{i}" for kind in "dp" for i in range(6)]), st.integers(1, 600)),
)


@settings(max_examples=60)
@given(fleet=_FLEETS, tokens=st.integers(1, 9000), seed=st.integers(0, 9))
def test_a_decision_is_one_of_its_options_and_is_deterministic(
    fleet: tuple[list[Candidate], list[Candidate], dict[str, int]], tokens: int, seed: int
) -> None:
    combined, prefill, cached = fleet
    placement = _place(tokens, combined, prefill, cached, seed=seed)
    again = _place(tokens, [replace(one) for one in combined], [replace(one) for one in prefill], cached, seed=seed)
    assert placement == again
    chosen = placement.chosen
    assert chosen.decode == placement.decode.worker_id
    assert chosen.prefill == (placement.prefill[0].worker_id if placement.prefill else "")
    assert chosen.cost_ms <= min(one.cost_ms for one in placement.options) + max(1.0, 0.1 * chosen.ttft_ms)
    for one in placement.options:
        assert one.cost_ms == sum(one.cost)
        assert one.cost_ms >= min(one.ttft_ms, 2000.0)
    assert all(min(one.cost[:-1]) >= 0 >= one.cost.late_ms for one in placement.options)
    # options that are not predicted in full could not be chosen: they cost more, or nearly as much with more to do
    lowest_ms = min(one.cost_ms for one in placement.predicted)
    for one in placement.others():
        near = one.cost_ms > lowest_ms - PolicySettings().near_ms and one.uncached_tokens >= chosen.uncached_tokens
        assert one.cost_ms > chosen.cost_ms or near
    assert chosen.prefix_source == (placement.prefix_source.worker_id if placement.prefix_source else "")
    assert not (chosen.prefill and chosen.prefix_source)
    assert 0 <= placement.long_prefill_tokens <= tokens
    assert len({one.worker_id for one in placement.prefill}) == len(placement.prefill)


def _way(worker: Candidate, uncached: int, before: int) -> object:
    """How a worker would compute a prompt: its split, mixed or not, before queued prompts or not."""
    estimator = worker.estimator
    if estimator.colocation.mode == "mixed":
        return None
    budget, split = estimator.colocation.prefill_budget(estimator.decodes, None)
    work = Work.prefill(uncached, before)
    return split, budget.mixed.fits(estimator.decodes, work), estimator.joins_decodes(uncached, before)


@settings(max_examples=150)
@given(
    worker=_CANDIDATES,
    prefill_worker=st.none() | _CANDIDATES,
    tokens=st.integers(1, 9000),
    cached=st.integers(0, 500),
    more=st.tuples(st.integers(0, 50), st.floats(0, 2000), st.integers(0, 2000)),
)
def test_more_load_makes_no_worker_more_attractive_unless_the_prompt_is_computed_otherwise(
    worker: Candidate, prefill_worker: Candidate | None, tokens: int, cached: int, more: tuple[int, float, int]
) -> None:
    streams, queue_ms, pages = more
    loaded = replace(
        worker,
        requests=worker.requests + streams,
        estimator=PrefillEstimator(
            worker.estimator.colocation, worker.estimator.decodes + Work.decode(streams, 1000 * streams)
        ),
        idle_at=worker.idle_at + queue_ms / 1e3,
        free_pages=max(0, worker.free_pages - pages),
    )
    prefill_workers = [replace(prefill_worker, worker_id="p")] if prefill_worker else []
    before, after = (
        {one.prefill: one for one in _place(tokens, [one], prefill_workers, {"x": cached} if cached else {}).options}
        for one in (worker, loaded)
    )
    uncached = tokens - min(cached * BLOCK_SIZE, tokens - 1)
    same_way = _way(worker, uncached, tokens - uncached) == _way(loaded, uncached, tokens - uncached)
    for route, option in before.items():
        assert after[route].itl_ms >= option.itl_ms - 1e-6
        # one more stream may change how the prompt is computed, which can lower the cost
        if route or same_way:
            assert after[route].cost_ms >= option.cost_ms - 1e-6


class TestSleep:
    """Workers whose models are off their devices."""

    @staticmethod
    def _asleep(name: str, serves_in_s: float = inf, **fields: Any) -> Candidate:
        return replace(_worker(name), serving=False, serves_at=serves_in_s, **fields)

    def test_the_time_to_wake_is_a_part_of_the_cost(self) -> None:
        for worker, wake_ms in ((self._asleep("d"), ASSUMED_WAKE_MS), (self._asleep("d", 3.0), 3000)):
            chosen, awake = _place(64, [worker]).chosen, _place(64, [_worker("d")]).chosen
            assert chosen.cost.wake_ms == wake_ms
            assert chosen.ttft_ms == pytest.approx(awake.ttft_ms + wake_ms)
            assert chosen.cost.wait_ms == awake.cost.wait_ms == 0

    def test_a_queue_that_is_longer_than_the_wake_wakes_another_worker(self) -> None:
        serves = _worker("d", queue_ms=8_000)
        assert _decode(_place(64, [serves, self._asleep("e", 9.0)])) == "d"
        assert _decode(_place(64, [serves, self._asleep("e", 7.0)])) == "e"

    def test_a_remote_prefill_waits_for_both_workers(self) -> None:
        streams = _worker("d", streams=64)
        for decode, prefill, wake_ms in (
            (streams, self._asleep("p", 1.0), 1000),
            (replace(streams, serving=False, serves_at=2.0), _worker("p"), 2000),
            (replace(streams, serving=False, serves_at=2.0), self._asleep("p", 1.0), 2000),
        ):
            remote = [one for one in _place(4096, [decode], [prefill]).options if one.prefill]
            assert [one.cost.wake_ms for one in remote] == [wake_ms]

    def test_its_cache_is_no_source_of_prefixes(self) -> None:
        for source, sources in ((_worker("s", streams=200), {"", "s"}), (self._asleep("s", 0.1), {""})):
            options = _place(8000, [source, _worker("d")], cached={"s": 499}).options
            assert {one.prefix_source for one in options if one.decode == "d"} == sources

    def test_the_pages_that_it_has_now_do_not_matter(self) -> None:
        empty = self._asleep("d", 1.0, free_pages=0, cached_pages=0)
        assert _place(4096, [empty]).chosen.cost == _place(4096, [self._asleep("d", 1.0)]).chosen.cost

    @given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), min_size=1, max_size=9), st.integers(0, 3))
    def test_the_shortlist_keeps_the_worker_that_serves_first(
        self, states: list[tuple[bool, float]], seed: int
    ) -> None:
        workers = [
            replace(_worker(f"d{number}"), serving=serving, serves_at=serves_at)
            for number, (serving, serves_at) in enumerate(states)
        ]
        chosen = _place(64, workers, seed=seed).decode
        best_ms = min(one.wake_ms(0.0) for one in workers)
        assert chosen.wake_ms(0.0) <= best_ms + max(1.0, 0.03 * (best_ms + 100))
