"""Token budgets that follow from the performance model, and the choice of the split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.performance.colocation import (
    ITL_MARGIN,
    MAX_BUDGET,
    MIN_BUDGET,
    BatchLimit,
    Colocation,
    Mode,
    PrefillBudget,
    PrefillEstimator,
)
from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, Work
from cpd.performance.split import SplitShares


def model(*, fixed_ms: float = 10.0, token_ms: float = 0.1, pair_ms: float = 0.0) -> PerfModel:
    """A step takes `fixed_ms`, and more for each token and each pair of a query and a key."""
    cost = StepCost(tokens=(1, 1001), tokens_ms=(fixed_ms + token_ms, fixed_ms + 1001 * token_ms), pair_ms=pair_ms)
    share = ShareProfile(share=1, decode=cost, prefill=cost)
    return PerfModel(Profile(schema="cpd-profile/1", source="roofline", device="d", model="m", shares=(share,)))


DECODES = Work.decode(8, 800)


def largest_chunk(rule: Colocation, decodes: Work = DECODES, *, before: int = 0, slowdown: float = 1.0) -> int:
    """The most tokens of a prompt, after `before` computed ones, that may join the decodes."""
    budget, _ = rule.prefill_budget(decodes, None, slowdown)
    return budget.mixed.chunk(decodes, 1 << 20, before)


class TestBudget:
    def test_a_given_budget_holds_with_and_without_decodes(self) -> None:
        rule = Colocation(model(), token_budget=300, itl_ms=1)
        assert rule.max_tokens == 300
        assert rule.prefill_budget(Work(), None) == (PrefillBudget(BatchLimit(300), chunked=True), None)
        assert largest_chunk(rule) == 300 - DECODES.tokens

    def test_without_decodes_it_prefills_at_nearly_full_speed(self) -> None:
        rule = Colocation(model(fixed_ms=10.0, token_ms=0.1), itl_ms=1)
        speeds = {size: size / (10 + 0.1 * size) for size in (rule.max_tokens - MIN_BUDGET, rule.max_tokens)}
        full = MAX_BUDGET / (10 + 0.1 * MAX_BUDGET)
        assert [speed >= 0.95 * full for speed in speeds.values()] == [False, True]
        assert largest_chunk(rule, Work()) == rule.max_tokens

    def test_if_size_does_not_matter_it_is_the_smallest(self) -> None:
        assert Colocation(model(fixed_ms=0.0)).max_tokens == MIN_BUDGET

    @pytest.mark.parametrize("before", [0, 5000, 20_000])
    def test_with_decodes_a_step_stays_within_the_target(self, before: int) -> None:
        predict = model(pair_ms=1e-5)
        chunk = largest_chunk(Colocation(predict, itl_ms=100), before=before)
        assert predict.step_ms(DECODES + Work.prefill(chunk, before)) <= 100 * ITL_MARGIN
        assert predict.step_ms(DECODES + Work.prefill(chunk + 1, before)) > 100 * ITL_MARGIN

    @pytest.mark.parametrize("slowdown", [0.5, 2.0])
    def test_a_device_slower_or_faster_than_its_profile_has_steps_within_the_target(self, slowdown: float) -> None:
        rule = Colocation(model(), itl_ms=50)
        measured = Colocation(model(fixed_ms=10.0 * slowdown, token_ms=0.1 * slowdown), itl_ms=50)
        corrected = largest_chunk(rule, slowdown=slowdown)
        assert corrected == largest_chunk(measured)
        assert corrected != largest_chunk(rule)

    def test_without_a_target_it_may_take_a_tenth_longer_than_the_decodes(self) -> None:
        predict = model(fixed_ms=100.0, token_ms=0.01)
        chunk = largest_chunk(Colocation(predict))
        assert predict.step_ms(DECODES + Work.prefill(chunk)) <= 1.1 * predict.step_ms(DECODES)
        assert predict.step_ms(DECODES + Work.prefill(chunk + 1)) > 1.1 * predict.step_ms(DECODES)

    def test_prompts_make_progress_if_no_step_is_within_the_target(self) -> None:
        for decodes in (DECODES, Work.decode(2 * MIN_BUDGET, 100_000)):
            rule = Colocation(model(pair_ms=1e-3), itl_ms=1)
            assert largest_chunk(rule, decodes) == largest_chunk(rule, decodes, before=100_000) == MIN_BUDGET

    @pytest.mark.parametrize("decodes", [8, 900, 1000, 1024])
    def test_a_batch_never_exceeds_max_tokens(self, decodes: int) -> None:
        rule = Colocation(PerfModel(Profile.load("h200-llama3-8b")))
        assert rule.max_tokens == 1024
        assert 0 <= largest_chunk(rule, Work.decode(decodes, 500 * decodes)) <= rule.max_tokens - decodes


@given(
    most=st.integers(1, 300),
    ms=st.floats(1, 100),
    any_time_tokens=st.integers(0, 50),
    decodes=st.integers(0, 100),
    tokens=st.integers(1, 400),
    before=st.integers(0, 5000),
)
def test_a_chunk_is_the_largest_that_may_join(
    most: int, ms: float, any_time_tokens: int, decodes: int, tokens: int, before: int
) -> None:
    limit = BatchLimit(most, ms, any_time_tokens, model(pair_ms=1e-4).step_ms)
    batch = Work.decode(decodes, 10 * decodes)
    chunk = limit.chunk(batch, tokens, before)
    assert 0 <= chunk <= tokens
    assert not chunk or limit.fits(batch, Work.prefill(chunk, before))
    assert chunk == tokens or not limit.fits(batch, Work.prefill(chunk + 1, before))


class TestPrefillMs:
    def test_it_is_the_sum_of_the_chunks(self) -> None:
        predict = model()
        rule = Colocation(predict, token_budget=256)
        alone = [rule.prefill_ms(Work.prefill(tokens), Work()) for tokens in (0, 100, 256, 2560)]
        assert alone == [0, predict.step_ms(Work.prefill(100)), step := predict.step_ms(Work.prefill(256)), 10 * step]

    def test_with_decodes_steps_are_longer_and_chunks_smaller(self) -> None:
        predict = model()
        rule = Colocation(predict, token_budget=256)
        steps = 2480 / (256 - DECODES.seqs)
        step_ms = predict.step_ms(DECODES + Work.prefill(256 - DECODES.seqs))
        assert rule.prefill_ms(Work.prefill(2480), DECODES) == pytest.approx(steps * step_ms)

    def test_on_a_lane_it_is_the_time_of_the_lane(self) -> None:
        predict = model()
        split = SplitShares(0.5, 0.5)
        rule = Colocation(predict, mode="lanes", splits=[split])
        assert rule.mode == "lanes"
        chunk = rule.prefill_budget(DECODES, None)[0].lane_chunk
        one = predict.step_ms(Work.prefill(chunk), split.prefill, DECODES)
        notice_ms = predict.step_ms(DECODES, split.decode, Work.prefill(chunk)) / 2  # until the end is noticed
        assert rule.prefill_ms(Work.prefill(3 * chunk), DECODES) == pytest.approx(3 * one + notice_ms)
        assert rule.prefill_ms(Work.prefill(chunk) + Work.prefill(chunk), DECODES) == pytest.approx(
            2 * (one + notice_ms)
        )
        assert rule.prefill_ms(Work.prefill(128), Work()) == pytest.approx(predict.step_ms(Work.prefill(128)))

    def test_many_short_prompts_count_as_many_sequences(self) -> None:
        cost = StepCost(tokens=(1, 101), tokens_ms=(1, 101), seq_ms=10)
        share = ShareProfile(share=1, decode=cost, prefill=cost)
        shares = PerfModel(Profile(schema="cpd-profile/1", source="roofline", device="d", model="m", shares=(share,)))
        rule = Colocation(shares, token_budget=100)
        prompts = Work.total(Work.prefill(20) for _ in range(10))
        assert rule.prefill_ms(prompts, Work()) == pytest.approx(2 * (100 + 5 * 10))


def test_a_device_that_cannot_be_split_is_mixed() -> None:
    assert Colocation(model(), mode="auto").mode == "mixed"


@pytest.mark.parametrize("mode", ["mixed", "lanes", "auto"])
@pytest.mark.parametrize("itl_ms", [0.0, 50.0])
def test_an_instant_device_has_a_budget(mode: Mode, itl_ms: float) -> None:
    rule = Colocation(PerfModel(Profile.load("instant")), mode=mode, splits=[SplitShares(0.5, 0.5)], itl_ms=itl_ms)
    for waiting in (0, 1):
        budget, _ = rule.prefill_budget(DECODES, None, waiting=waiting)
        assert budget.mixed.fits(DECODES, Work.prefill(1)) or budget.lane_chunk > 0
    estimate = PrefillEstimator(rule, DECODES).estimate(5000, 64)
    assert (estimate.ms, estimate.gap_ms, estimate.delay_ms) == (0, 0, 0)


@pytest.mark.parametrize("itl_ms", [0.0, 1000.0])
def test_the_lane_is_busy_or_gets_a_chunk(itl_ms: float) -> None:
    split = SplitShares(0.5, 0.5)
    rule = Colocation(model(), mode="auto", splits=[split], itl_ms=itl_ms)
    budget, chosen = rule.prefill_budget(DECODES, None)
    assert chosen is split
    assert budget.lane_chunk > 0
    assert rule.prefill_budget(DECODES, split)[0].lane_chunk == 0


class TestTarget:
    """Decodes take 30 ms; on a lane, 30 ms / share."""

    SPLITS = (SplitShares(0.5, 0.5), SplitShares(0.25, 0.75))

    def rule(self, itl_ms: float, token_ms: float, mode: Mode = "auto") -> Colocation:
        def cost(share: float) -> StepCost:
            return StepCost(tokens=(1, 1001), tokens_ms=(30 / share, (30 + 1000 * token_ms) / share))

        shares = tuple(ShareProfile(share=s, decode=cost(s), prefill=cost(s)) for s in (0.25, 0.5, 0.75, 1.0))
        profile = Profile(schema="cpd-profile/1", source="roofline", device="d", model="m", shares=shares)
        return Colocation(PerfModel(profile), mode=mode, splits=self.SPLITS, itl_ms=itl_ms / ITL_MARGIN)

    def test_a_split_within_the_target_wins_over_a_faster_prefill(self) -> None:
        assert self.rule(itl_ms=45, token_ms=0.1).prefill_budget(DECODES, None)[1] == self.SPLITS[1]
        assert self.rule(itl_ms=65, token_ms=0.1).prefill_budget(DECODES, None)[1] == self.SPLITS[0]

    def test_if_no_split_is_within_it_prompts_are_chunked_in_the_decodes_batch(self) -> None:
        budget, split = self.rule(itl_ms=38, token_ms=0.01).prefill_budget(DECODES, None)
        assert split is None
        assert budget.chunked

    def test_unless_chunks_make_longer_gaps_than_a_split(self) -> None:
        rule = self.rule(itl_ms=38, token_ms=1)
        budget, split = rule.prefill_budget(DECODES, None)
        assert rule.model.step_ms(DECODES + Work.prefill(MIN_BUDGET)) > 100
        assert split is not None
        assert budget.lane_chunk > 0

    def test_if_prompts_wait_chunks_in_the_decodes_batch_are_used_where_they_compute_faster(self) -> None:
        rule = self.rule(itl_ms=100, token_ms=0.1)  # whole device: 700 tokens in 100 ms; half of it: 260 ms for 1,000
        assert rule.prefill_budget(DECODES, None)[1] == self.SPLITS[0]
        budget, split = rule.prefill_budget(DECODES, None, waiting=1)
        assert split is None
        assert budget.chunked
        step_ms = rule.model.step_ms(DECODES + Work.prefill(budget.mixed.chunk(DECODES, 1000, 0)))
        assert 95 < step_ms <= 100

    def test_if_prompts_wait_the_lane_is_used_where_it_computes_faster(self) -> None:
        cost = StepCost(tokens=(1, 1001), tokens_ms=(30, 130))  # as fast on any share
        shares = tuple(ShareProfile(share=share, decode=cost, prefill=cost) for share in (0.5, 1.0))
        profile = Profile(schema="cpd-profile/1", source="roofline", device="d", model="m", shares=shares)
        rule = Colocation(PerfModel(profile), mode="auto", splits=self.SPLITS[:1], itl_ms=50)
        assert rule.prefill_budget(DECODES, None, waiting=1)[1] == self.SPLITS[0]

    def test_if_prompts_wait_the_lane_is_used_where_chunks_cost_the_streams_more_than_they_save(self) -> None:
        decode = StepCost(tokens=(1, 1001), tokens_ms=(30, 130))  # as fast on any share

        def prefill(share: float) -> StepCost:
            return StepCost(tokens=(1, 1001), tokens_ms=(30 / share, 130 / share))

        shares = tuple(ShareProfile(share=share, decode=decode, prefill=prefill(share)) for share in (0.5, 1.0))
        profile = Profile(schema="cpd-profile/1", source="roofline", device="d", model="m", shares=shares)
        rule = Colocation(PerfModel(profile), mode="auto", splits=self.SPLITS[:1], itl_ms=100 / ITL_MARGIN)
        on_lane_ms = rule.model.step_ms(Work.prefill(rule.max_tokens), 0.5) / rule.max_tokens
        saved_ms = on_lane_ms - 100 / 700  # of a prompt's token, in chunks of 700; each stream loses 70 ms with one
        waiting = [rule.prefill_budget(DECODES, None, waiting=count)[1] is None for count in range(20)]
        assert waiting.index(True) == pytest.approx(DECODES.seqs * 0.1 / saved_ms - 1, abs=1)
        assert all(waiting[waiting.index(True) :])

    def test_in_mode_lanes_decodes_take_up_to_twice_as_long_if_no_split_is_within_it(self) -> None:
        assert self.rule(itl_ms=38, token_ms=0.01, mode="lanes").prefill_budget(DECODES, None)[1] == self.SPLITS[0]


class TestPrefillEstimator:
    RULE = Colocation(model(), mode="auto", splits=[SplitShares(0.5, 0.5)], itl_ms=50)

    def test_without_decodes_a_prompt_has_the_whole_device(self) -> None:
        estimate = PrefillEstimator(self.RULE).estimate(100, 0)
        assert (estimate.ms, estimate.gap_ms, estimate.delay_ms) == (model().step_ms(Work.prefill(100)), 0, 0)

    def test_a_short_prompt_joins_the_decodes_and_a_long_one_goes_to_the_lane(self) -> None:
        estimator = PrefillEstimator(self.RULE, DECODES)
        mixed = largest_chunk(self.RULE)
        assert estimator.estimate(mixed, 0).ms == model().step_ms(DECODES + Work.prefill(mixed))
        assert estimator.estimate(4 * mixed, 0).gap_ms == model().step_ms(DECODES, 0.5, Work.prefill(1))

    def test_delay_of_streams_is_the_extra_time_of_their_steps(self) -> None:
        estimator = PrefillEstimator(Colocation(model(), itl_ms=50), DECODES)
        chunk = largest_chunk(estimator.colocation)
        estimate = estimator.estimate(3 * chunk, 0)
        assert estimate.delay_ms == pytest.approx(estimate.ms - 3 * estimator.alone_ms)
        assert estimate.gap_ms <= 50

    def test_a_prompt_joins_the_decodes_batch_instead_of_waiting_if_the_policy_allows(self) -> None:
        busy, _ = self.RULE.prefill_budget(DECODES, self.RULE.splits[0])
        most = busy.mixed.chunk(DECODES, 1 << 20, 0)
        estimator = PrefillEstimator(self.RULE, DECODES)
        assert estimator.joins_decodes(most, 0)
        assert not estimator.joins_decodes(most + 1, 0)
        assert not PrefillEstimator(Colocation(model(), itl_ms=50), DECODES).joins_decodes(1, 0)

    def test_beside_decodes_the_gap_of_a_prompt_with_many_cached_tokens_stays_within_the_target(self) -> None:
        rule = Colocation(model(pair_ms=1e-5), itl_ms=100)
        for before in (0, 10_000, 30_000):
            estimate = PrefillEstimator(rule, DECODES).estimate(400, before)
            assert estimate.gap_ms <= 100 * ITL_MARGIN
            assert estimate.ms >= rule.model.step_ms(DECODES + Work.prefill(400, before))

    def test_with_many_cached_tokens_a_prompt_goes_to_the_lane(self) -> None:
        rule = Colocation(model(pair_ms=1e-5), mode="auto", splits=[SplitShares(0.5, 0.5)], itl_ms=50)
        estimator = PrefillEstimator(rule, DECODES)
        assert estimator.estimate(100, 0).ms == rule.model.step_ms(DECODES + Work.prefill(100))
        assert estimator.estimate(100, 30_000).gap_ms == rule.model.step_ms(DECODES, 0.5, Work.prefill(1))

    @pytest.mark.parametrize("tokens", [1, 100, 5000])
    def test_a_slower_worker_takes_longer_by_its_slowdown(self, tokens: int) -> None:
        fast, slow = (
            PrefillEstimator(self.RULE, DECODES).estimate(tokens, 64),
            PrefillEstimator(self.RULE, DECODES, 2.5).estimate(tokens, 64),
        )
        assert slow.ms == pytest.approx(2.5 * fast.ms)
        assert slow.gap_ms == pytest.approx(2.5 * fast.gap_ms)
        assert slow.delay_ms == pytest.approx(2.5 * fast.delay_ms)
