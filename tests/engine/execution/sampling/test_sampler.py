import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.grammar.constraint import mask_of
from engine.batch import SampleRow
from engine.execution.sampling import sampler as sampler_module
from engine.execution.sampling.sampler import Sampler
from engine.ops.cpu_ops import CpuOps
from engine.ops.torch_ops import TorchOps
from engine.types import SamplingParams, ThinkingBudget
from tests.gumbel import gumbel_noise

VOCAB = 61


@pytest.fixture(scope="module", params=[TorchOps, CpuOps], autouse=True)
def back_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs with plain torch and with the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "TorchOps", request.param)
        yield


BoolArray = npt.NDArray[np.bool_]


def row(
    index: int = 0,
    *,
    choice: int = 0,
    position: int = 10,
    tokens: list[int] | None = None,
    prompt_len: int = 5,
    **params: Any,
) -> SampleRow:
    known = list(range(position)) if tokens is None else tokens
    return SampleRow(
        index,
        SamplingParams(**params),
        choice,
        len(known),
        np.array(known, dtype=np.int32),
        min(prompt_len, len(known)),
    )


def logits_of(seed: int, rows: int = 1, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, *rows: SampleRow) -> list[int]:
    return [sampled.token_id for sampled in Sampler(logits.shape[1]).sample(logits.clone(), list(rows))]


def drawn(logits: torch.Tensor, kept: BoolArray, r: SampleRow) -> int:
    """Returns the expected token: the largest logit / temperature + noise among the kept tokens."""
    noised = logits[0] / r.params.temperature + gumbel_noise(r.params.seed, r.choice, r.position, logits.shape[1])
    return int(torch.where(torch.from_numpy(kept), noised, -math.inf).argmax())


def all_of(logits: torch.Tensor) -> BoolArray:
    return np.ones(logits.shape[1], dtype=bool)


class TestGreedy:
    def test_takes_the_most_likely_token(self) -> None:
        logits = logits_of(1, rows=4)
        assert sample(logits, *(row(i, temperature=0.0) for i in range(4))) == logits.argmax(dim=-1).tolist()

    def test_lowest_id_wins_a_tie(self) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, [17, 40, 59]] = 2.0
        assert sample(logits, row(temperature=0.0)) == [17]
        assert sample(logits.bfloat16(), row(temperature=0.0)) == [17]

    def test_a_temperature_too_small_to_divide_by_is_greedy(self) -> None:
        logits = logits_of(2)
        assert sample(logits, row(temperature=1e-30)) == [int(logits.argmax())]

    def test_no_rows_give_no_tokens(self) -> None:
        assert Sampler(VOCAB).sample(torch.empty(0, VOCAB), []) == []


class TestNoise:
    def test_a_token_is_the_argmax_of_tempered_logits_and_noise(self) -> None:
        for seed in range(50):
            logits = logits_of(seed)
            r = row(seed=seed, temperature=0.5 + seed / 20, position=seed, choice=seed % 3)
            assert sample(logits, r) == [drawn(logits, all_of(logits), r)]

    def test_depends_on_seed_choice_position_and_token_alone(self) -> None:
        base = gumbel_noise(3, 1, 20, 1000)
        assert torch.equal(base, gumbel_noise(3, 1, 20, 1000))
        assert torch.equal(base[:500], gumbel_noise(3, 1, 20, 500))
        for other in (gumbel_noise(4, 1, 20, 1000), gumbel_noise(3, 2, 20, 1000), gumbel_noise(3, 1, 21, 1000)):
            assert (base == other).sum() < 3

    def test_is_pinned(self) -> None:
        """Changing the noise would change the tokens of a seed, and old and new workers would disagree."""
        noise = gumbel_noise(seed=42, choice=1, position=7, vocab_size=5)
        torch.testing.assert_close(
            noise, torch.tensor([-0.1692525, 4.662744, 0.2962484, -0.3467665, 0.8548867]), rtol=0, atol=1e-6
        )

    def test_seeds_of_64_bits_count_in_full(self) -> None:
        assert not torch.equal(gumbel_noise(1, 0, 0, 100), gumbel_noise(1 + (1 << 63), 0, 0, 100))

    def test_is_gumbel_distributed_and_uncorrelated(self) -> None:
        vocab_size, euler_gamma = 40_000, 0.5772156649
        noise = torch.stack([gumbel_noise(s, c, p, vocab_size) for s in (0, 1) for c in (0, 1) for p in range(8)])
        assert torch.isfinite(noise).all()
        assert noise.mean().item() == pytest.approx(euler_gamma, abs=0.01)
        assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
        correlation = torch.corrcoef(noise) - torch.eye(len(noise))
        assert correlation.abs().max() < 5 / math.sqrt(vocab_size)
        neighbours = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
        assert abs(neighbours) < 5 / math.sqrt(noise.numel())

    @pytest.mark.parametrize("key", ["position", "choice", "seed"])
    def test_draws_follow_the_distribution_independently_of_each_other(self, key: str) -> None:
        draws, vocab_size = 20_000, 6
        logits = torch.tensor([[2.0, 1.0, 0.0, 0.5, -1.0, 1.5]])
        tokens = np.zeros(draws, dtype=np.int32)
        rows = []
        for i in range(draws):
            at = {"position": 100, "choice": 0, "seed": 7, key: i}
            params = SamplingParams(temperature=1.3, seed=at["seed"])
            rows.append(SampleRow(0, params, at["choice"], at["position"], tokens[:1], 1))
        got = np.array(sample(logits.expand(draws, -1).clone(), *rows))
        probabilities = torch.softmax(logits[0] / 1.3, dim=0).double().numpy()
        assert_chi_square(np.bincount(got, minlength=vocab_size), probabilities * draws)
        pairs = np.bincount(got[:-1] * vocab_size + got[1:], minlength=vocab_size**2)
        assert_chi_square(pairs, np.outer(probabilities, probabilities).ravel() * (draws - 1))

    def test_a_small_probability_is_drawn_as_often_as_it_should_be(self) -> None:
        draws, rare = 50_000, 0.001
        logits = torch.tensor([[math.log(rare), math.log(1 - rare)]])
        rows = [SampleRow(0, SamplingParams(seed=5), 0, i, np.zeros(0, dtype=np.int32), 0) for i in range(draws)]
        got = sample(logits.expand(draws, -1).clone(), *rows)
        assert got.count(0) == pytest.approx(draws * rare, abs=5 * math.sqrt(draws * rare))


def assert_chi_square(observed: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> None:
    """Asserts a deviation below five standard deviations. The samples are fixed, so the test is deterministic."""
    degrees = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.8]),
        "top_k": st.sampled_from([0, 1, 5, 1000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([{}, {3: 4.0, 60: -100.0}]),
        "min_tokens": st.sampled_from([0, 50]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({2, 9})]),
        "top_logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 3),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    seed=st.integers(0, 100),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_a_row_gives_the_same_alone_and_in_any_batch(params: list[dict[str, Any]], seed: int, dtype: str) -> None:
    logits = logits_of(seed, rows=len(params)).to(getattr(torch, dtype))
    rows = [row(i, position=10 + i, **p) for i, p in enumerate(params)]
    together = Sampler(VOCAB).sample(logits.clone(), rows)
    for i, r in enumerate(rows):
        assert Sampler(VOCAB).sample(logits[i : i + 1].clone(), [r]) == [together[i]]


class TestFilters:
    """Compares with a plain definition: sort, accumulate, cut."""

    @settings(deadline=None, max_examples=150)
    @given(
        seed=st.integers(0, 10_000),
        temperature=st.sampled_from([0.5, 1.0, 3.0]),
        top_k=st.integers(0, 70),
        top_p=st.floats(0.01, 1.0),
        min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    )
    def test_top_k_then_top_p_then_min_p(
        self, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        logits = logits_of(seed)
        probabilities = torch.softmax(logits[0].double() / temperature, dim=0).numpy()
        order = np.argsort(-probabilities)
        kept = all_of(logits)
        if top_k:
            kept[order[top_k:]] = False
        if top_p < 1.0:
            among = np.where(kept, probabilities, 0.0)[order] / probabilities[kept].sum()
            kept[order[np.cumsum(among) - among >= top_p]] = False
        kept &= probabilities >= min_p * probabilities.max() * (1 - 1e-6)
        r = row(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert sample(logits, r) == [drawn(logits, kept, r)]

    def test_equal_logits_at_the_border_stay_together(self) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, :4] = 5.0
        got = {sample(logits, row(seed=seed, top_k=2))[0] for seed in range(100)}
        assert got == {0, 1, 2, 3}

    def test_ties_of_the_whole_vocabulary_stay_together(self) -> None:
        logits = torch.zeros(1, VOCAB)
        got = {sample(logits, row(seed=seed, top_k=2))[0] for seed in range(1000)}
        assert got == set(range(VOCAB))

    def test_rows_with_different_filters_share_a_batch(self) -> None:
        logits = logits_of(2, rows=4)
        rows = [row(0, top_k=3, seed=1), row(1, seed=2), row(2, top_k=50, seed=3), row(3, top_k=1, temperature=0.0)]
        alone = [sample(logits[i : i + 1], r)[0] for i, r in enumerate(rows)]
        assert sample(logits, *rows) == alone

    def test_rows_without_filters_are_left_alone(self) -> None:
        logits = logits_of(3, rows=2)
        rows = row(0, seed=1, top_k=1, top_p=0.1), row(1, seed=2, temperature=5.0)
        assert sample(logits, *rows) == [int(logits[0].argmax()), drawn(logits[1:], all_of(logits), rows[1])]

    def test_top_p_of_almost_nothing_keeps_one_token(self) -> None:
        logits = logits_of(4)
        assert sample(logits, row(top_p=1e-9, temperature=9.0)) == [int(logits.argmax())]


class TestPenalties:
    def greedy(self, logits: list[float], tokens: list[int], prompt_len: int, **params: Any) -> int:
        return sample(torch.tensor([logits]), row(tokens=tokens, prompt_len=prompt_len, temperature=0.0, **params))[0]

    def test_presence_counts_output_tokens_once(self) -> None:
        assert self.greedy([1.0, 0.7, 0.0], [0, 0, 0, 1], 3, presence_penalty=0.5) == 0  # token 0 is only in the prompt
        assert self.greedy([1.0, 0.7, 0.0], [0, 0, 0, 0], 1, presence_penalty=0.2) == 0
        assert self.greedy([1.0, 0.7, 0.0], [0, 0, 0, 0], 1, presence_penalty=0.4) == 1

    def test_frequency_counts_each_output_token(self) -> None:
        assert self.greedy([1.0, 0.7, 0.0], [0, 0, 0, 0], 1, frequency_penalty=0.09) == 0
        assert self.greedy([1.0, 0.7, 0.0], [0, 0, 0, 0], 1, frequency_penalty=0.11) == 1

    def test_repetition_divides_positive_and_multiplies_negative_logits_of_all_tokens(self) -> None:
        assert self.greedy([1.0, 0.7, 0.0], [0], 1, repetition_penalty=1.3) == 0
        assert self.greedy([1.0, 0.7, 0.0], [0], 1, repetition_penalty=1.5) == 1
        assert self.greedy([1.0, 0.7, 0.0], [0, 0], 1, repetition_penalty=1.3) == 0  # once, however often it occurred
        assert self.greedy([-1.0, -1.2, -9.0], [0, 0], 1, repetition_penalty=1.3) == 1

    def test_repetition_comes_before_the_others(self) -> None:
        """2 / 2 - 0.5 = 0.5; the other order gives 0.75."""
        assert self.greedy([2.0, 0.6, 0.0], [9, 0], 1, repetition_penalty=2.0, presence_penalty=0.5) == 1

    def test_logit_bias_is_added(self) -> None:
        assert self.greedy([1.0, 0.7, 0.0], [0], 1, logit_bias={2: 1.5, 0: -0.5}) == 2
        assert self.greedy([1.0, 0.7, 0.0], [0], 1, logit_bias={0: -100.0, 77: 100.0}) == 1

    def test_stop_tokens_wait_for_min_tokens(self) -> None:
        stop = {"stop_token_ids": frozenset({0, 99}), "min_tokens": 3, "logit_bias": {0: 100.0}}
        assert self.greedy([1.0, 0.7, 0.0], [2, 2, 2, 2], 2, **stop) == 1
        assert self.greedy([1.0, 0.7, 0.0], [2, 2, 2, 2, 2], 2, **stop) == 0

    def test_nothing_is_penalised_before_the_first_output(self) -> None:
        assert self.greedy([1.0, 0.7, 0.0], [0, 0], 2, presence_penalty=2.0, frequency_penalty=2.0) == 0


class TestThinkingBudget:
    def next_after(self, output: list[int], budget: ThinkingBudget, **params: Any) -> int:
        """The next token behind a prompt that has the token that ends reasoning, 4."""
        r = row(tokens=[4, 4, *output], prompt_len=2, thinking_budget=budget, **params)
        return sample(torch.tensor([[0.0, 9.0, 0.0, 0.0, -9.0, 0.0]]), r)[0]

    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 2}, {"min_p": 0.9}])
    def test_reasoning_that_the_prompt_began_ends_after_it(self, params: dict[str, Any]) -> None:
        budget = ThinkingBudget(3, end_token=4)
        assert self.next_after([1, 1], budget, **params) != 4
        assert self.next_after([1, 1, 1], budget, **params) == 4
        assert self.next_after([], ThinkingBudget(0, end_token=4), **params) == 4

    def test_reasoning_that_has_ended_is_over(self) -> None:
        assert self.next_after([1, 4, 1], ThinkingBudget(3, end_token=4), temperature=0.0) == 1

    def test_an_output_that_does_not_begin_with_the_first_token_does_not_reason(self) -> None:
        budget = ThinkingBudget(2, end_token=4, start_token=3)
        assert self.next_after([3, 1], budget, temperature=0.0) == 1
        assert self.next_after([3, 1, 1], budget, temperature=0.0) == 4
        assert self.next_after([1, 3, 1], budget, temperature=0.0) == 1
        assert self.next_after([], ThinkingBudget(0, 4, 3), temperature=0.0) == 1

    def test_where_a_grammar_forbids_the_end_it_comes_as_soon_as_it_may(self) -> None:
        budget = ThinkingBudget(1, end_token=4)
        logits = logits_of(3)
        for output in ([1], [1, 1]):
            known = {"tokens": [0, *output], "prompt_len": 1, "thinking_budget": budget}
            assert sample(logits, constrained(Only(8), **known)) == [8]
            assert sample(logits, constrained(Only(8, 4), **known)) == [4]


class TestLogprobs:
    def test_are_of_the_models_own_distribution(self) -> None:
        logits = logits_of(5)
        want = torch.log_softmax(logits[0], dim=0)
        r = row(temperature=0.3, top_k=3, presence_penalty=1.0, logit_bias={4: 50.0}, top_logprobs=5)
        (sampled,) = Sampler(VOCAB).sample(logits.clone(), [r])
        assert sampled.token_id == 4
        assert sampled.logprobs is not None
        assert sampled.logprobs.logprob == pytest.approx(want[4].item(), abs=1e-6)
        best = want.topk(5)
        assert [token_id for token_id, _ in sampled.logprobs.top] == best.indices.tolist()
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-6)

    def test_come_only_where_asked_for_and_as_many_as_asked_for(self) -> None:
        rows = row(0), row(1, top_logprobs=0), row(2, top_logprobs=2), row(3, top_logprobs=500)
        reported = [s.logprobs for s in Sampler(VOCAB).sample(logits_of(6, rows=4), list(rows))]
        assert reported[0] is None
        assert [len(logprobs.top) for logprobs in reported[1:] if logprobs is not None] == [0, 2, VOCAB]


def test_tokens_can_be_read_after_copying_to_the_host() -> None:
    rows = [row(0, temperature=0.0, top_logprobs=2), row(1, temperature=1.0, seed=3), row(2, temperature=0.0)]
    logits, sampler = logits_of(5, rows=3), Sampler(VOCAB)
    assert sampler.choose(logits.clone(), rows).to_host().read() == sampler.sample(logits.clone(), rows)


class Only:
    """A constraint that allows some tokens."""

    def __init__(self, *tokens: int, at_the_end: int | None = None, instead: int | None = None) -> None:
        self._tokens = tokens
        self._instead = instead
        self._at_the_end = () if at_the_end is None else (at_the_end,)

    def mask(self, *, may_end: bool = True) -> npt.NDArray[np.int32]:
        return mask_of([*self._tokens, *(self._at_the_end if may_end else ())], VOCAB)

    def replacement(self) -> int | None:
        return self._instead


def constrained(only: Any, **params: Any) -> SampleRow:
    return replace(row(**params), constraint=only)


class TestGrammars:
    @given(seed=st.integers(0, 1000), top_k=st.sampled_from([0, 1, 3, 20]), top_p=st.sampled_from([1.0, 0.3]))
    def test_only_allowed_tokens_are_chosen(self, seed: int, top_k: int, top_p: float) -> None:
        """0, 31, 32 and 60 are at the borders of the mask's words."""
        params: dict[str, Any] = {"seed": seed, "top_k": top_k, "top_p": top_p}
        rows = [constrained(Only(0, 31, 32, 60), **params), row(1, **params), constrained(Only(7), index=2, **params)]
        logits = logits_of(seed, rows=3)
        together = sample(logits, *rows)
        assert together[0] in (0, 31, 32, 60)
        assert together[2] == 7
        for i, one in enumerate(rows):
            assert sample(logits[i : i + 1], replace(one, row=0)) == [together[i]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_likeliest_allowed_token_is_chosen_after_penalties_and_bias(self, dtype: torch.dtype) -> None:
        logits = logits_of(1).to(dtype)
        assert sample(logits, constrained(Only(4, 5), temperature=0.0, logit_bias={4: 100.0, 9: 100.0})) == [4]

    def test_filters_count_only_allowed_tokens(self) -> None:
        logits = logits_of(2)
        logits[0, :30] += 50
        chosen = {sample(logits, constrained(Only(40, 41), seed=seed, top_k=2))[0] for seed in range(50)}
        assert chosen == {40, 41}

    def test_a_minimum_of_tokens_is_the_constraints_concern(self) -> None:
        params: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": frozenset({3}), "logit_bias": {3: 100.0}}
        only = Only(8, at_the_end=3)
        assert sample(logits_of(3), constrained(only, **params, min_tokens=0)) == [3]
        assert sample(logits_of(3), constrained(only, **params, min_tokens=50)) == [8]
        assert sample(logits_of(3), constrained(Only(3), **params, min_tokens=50)) == [3]  # it can only end

    def test_logprobs_stay_the_models_own(self) -> None:
        logits = logits_of(4)
        (sampled,) = Sampler(VOCAB).sample(logits.clone(), [constrained(Only(11), top_logprobs=2)])
        own = torch.log_softmax(logits[0], dim=-1)
        assert sampled.logprobs is not None
        assert sampled.logprobs.logprob == pytest.approx(float(own[11]), abs=1e-5)
        assert [token for token, _ in sampled.logprobs.top] == own.topk(2).indices.tolist()
        assert sampled.replacement is None

    def test_a_token_that_may_take_the_place_of_another_has_its_own_logprob(self) -> None:
        logits = logits_of(4, rows=3)
        rows = [constrained(Only(11, instead=9), top_logprobs=2), row(1), row(2, top_logprobs=1)]
        first, _, last = Sampler(VOCAB).sample(logits.clone(), rows)
        assert first.logprobs is not None
        assert first.replacement is not None
        assert first.token_id == 11
        assert first.replacement.logprob == pytest.approx(float(torch.log_softmax(logits[0], dim=-1)[9]), abs=1e-5)
        assert first.replacement.top == first.logprobs.top
        assert last.replacement is None
