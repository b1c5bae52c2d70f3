"""Samples tokens from logits.

Order of operations:

    1. log-probabilities of the model's own distribution
    2. masks of grammars
    3. repetition penalty; presence and frequency penalties, logit bias, thinking budgets, mask of `min_tokens`
    4. temperature, top-k, top-p, min-p, and the draw

engine/ops/draw.py does what comes from 3 on.

The noise of a draw is a hash of (seed, choice, position, token id), not a generator's state. So a request gets the same
tokens in any batch, any order of steps and on any worker.

On a GPU only `ChosenTokens.read` waits for the device. The masks of grammars are computed on the host while the device
computes the logits (that has not run on a GPU yet).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import Sampled, SampleRow
from engine.ops.base import Ops
from engine.ops.buffers import take, upload, upload_indices
from engine.ops.draw import Changes, Draws
from engine.ops.torch_ops import TorchOps
from engine.types import GREEDY_BELOW, TokenLogprobs

_CERTAIN = 1e9
"""Added to a logit, it makes the token certain, unless a grammar masks it."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """Sampled tokens, which the device may still be computing.

    Attributes:
        token_ids: int64 [R]
        with_logprobs: Rows that asked for log-probabilities. [L]
        tops: Number of alternatives that each of those rows asked for. [L]
        replacements: Tokens that may take the place of these rows' tokens; None: none will. [L]
        logprobs: Log-probabilities of the chosen tokens and of their replacements [L, 2], of the most likely tokens
            [L, max(tops)], and the ids of the latter. None if L is 0.
    """

    token_ids: Tensor
    with_logprobs: Sequence[int] = ()
    tops: Sequence[int] = ()
    replacements: Sequence[int | None] = ()
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None

    def to_host(self) -> Self:
        """Starts copying everything to pinned memory, in order with the current stream. Read it when that is done."""

        def copied(tensor: Tensor) -> Tensor:
            return tensor.to("cpu", non_blocking=True)

        logprobs = None
        if self.logprobs is not None:
            own, best, ids = self.logprobs
            logprobs = copied(own), copied(best), copied(ids)
        return replace(self, token_ids=copied(self.token_ids), logprobs=logprobs)

    def read(self) -> list[Sampled]:
        """Returns the token of each row."""
        sampled = [Sampled(token_id) for token_id in self.token_ids.tolist()]
        if self.logprobs is not None:
            of_own = (tensor.tolist() for tensor in self.logprobs)
            of_rows = zip(self.with_logprobs, self.tops, self.replacements, *of_own, strict=True)
            for row, top, replacement, (chosen, other), values, tokens in of_rows:
                alternatives = list(zip(tokens[:top], values[:top], strict=True))
                sampled[row].logprobs = TokenLogprobs(chosen, alternatives)
                if replacement is not None:
                    sampled[row].replacement = TokenLogprobs(other, alternatives)
        return sampled


class Sampler:
    """Samples one token per row. It has no state."""

    def __init__(self, vocab_size: int, ops: Ops | None = None) -> None:
        self._vocab_size = vocab_size
        self._ops = TorchOps() if ops is None else ops

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Chooses tokens and waits for them. `rows` can be empty. See `choose`."""
        return self.choose(logits, rows).read() if rows else []

    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> ChosenTokens:
        """Chooses a token for each row.

        Args:
            logits: Output of the model in any floating type; masks change it. [R, V]
            rows: How to choose each token; at least one row. [R]
        """
        if all(row.params.takes_most_likely and row.constraint is None for row in rows):
            return ChosenTokens(self._ops.top_k(logits, 1)[1].flatten())
        with_logprobs = [i for i, row in enumerate(rows) if row.params.top_logprobs is not None]
        if not with_logprobs:
            return ChosenTokens(self._draw(logits, rows))
        tops = [rows[i].params.top_logprobs or 0 for i in with_logprobs]
        constraints = [rows[i].constraint for i in with_logprobs]
        replacements = [None if c is None else c.replacement() for c in constraints]
        others = upload_indices(np.array([[token or 0] for token in replacements]), logits.device)
        raw = take(logits, with_logprobs)
        best, ids = self._ops.top_k(raw, max(1, min(max(tops), self._vocab_size)))
        total = self._ops.log_sum_exp(raw)[:, None]
        of_others = raw.gather(1, others)  # masks change logits, but not that of the chosen token
        chosen = self._draw(logits, rows)
        own = torch.cat([raw.gather(1, take(chosen, with_logprobs)[:, None]), of_others], dim=1).float()
        return ChosenTokens(chosen, with_logprobs, tops, replacements, (own - total, best.float() - total, ids))

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Masks and draws. [R, V] -> [R]"""
        if constrained := [i for i, row in enumerate(rows) if row.constraint is not None]:
            self._constrain(logits, rows, constrained)
        return self._ops.draw(logits, _draws(rows, self._vocab_size))

    def _constrain(self, logits: Tensor, rows: Sequence[SampleRow], constrained: Sequence[int]) -> None:
        """Masks the tokens that the grammars of these rows do not allow, in place. [R, V]"""
        masks = np.empty((len(constrained), (logits.shape[1] + 31) // 32), np.int32)
        for i, index in enumerate(constrained):
            row = rows[index]
            assert row.constraint is not None
            masks[i] = row.constraint.mask(may_end=not _too_short(row))
        indices, of_rows = upload_indices(constrained, logits.device), upload(torch.from_numpy(masks), logits.device)
        self._ops.mask_logits(logits, indices, of_rows)


def _draws(rows: Sequence[SampleRow], vocab_size: int) -> Draws:
    params = [row.params for row in rows]
    factors, additions = _changes(rows, vocab_size)
    return Draws(
        np.array([p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params], np.float32),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        _row_keys(rows),
        factors,
        additions,
    )


def _row_keys(rows: Sequence[SampleRow]) -> npt.NDArray[np.int32]:
    """Computes two 32-bit keys for each row, the second one odd. [R, 2]"""
    states = np.array([_choice_state(row.params.seed, row.choice) for row in rows], dtype=np.uint64)
    keys = _mix(states + np.array([row.position for row in rows], dtype=np.uint64)).view(np.int32).reshape(-1, 2)
    keys[:, 1] |= 1
    return keys


@lru_cache(maxsize=4096)
def _choice_state(seed: int, choice: int) -> int:
    """Hashes what stays the same for all tokens of an answer."""
    state = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    return int(_mix(state + np.uint64(choice))[0])


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Computes one step of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _must_end_thinking(row: SampleRow) -> bool:
    """True if the next token must end the output's reasoning."""
    budget = row.params.thinking_budget
    return budget is not None and budget.must_end(row.tokens[row.prompt_len :])


def _too_short(row: SampleRow) -> bool:
    """True if the output has fewer than `min_tokens` tokens."""
    return row.position - row.prompt_len < row.params.min_tokens


def _changes(rows: Sequence[SampleRow], vocab_size: int) -> tuple[Changes | None, Changes | None]:
    """Returns the factors and additions of penalties, bias, thinking budgets and the mask of `min_tokens`."""
    factors, additions = _Entries(vocab_size), _Entries(vocab_size)
    for i, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1.0:
            ids, _ = row.counts.tokens.of(row.tokens)
            factors.add(i, ids, np.full(len(ids), p.repetition_penalty, np.float32))  # once for each distinct token
        if p.presence_penalty or p.frequency_penalty:
            ids, counts = row.counts.outputs.of(row.tokens, row.prompt_len)
            additions.add(i, ids, -(p.frequency_penalty * counts + p.presence_penalty))
        if p.logit_bias:
            additions.add(i, list(p.logit_bias), list(p.logit_bias.values()))
        if p.thinking_budget is not None and _must_end_thinking(row):
            additions.add(i, [p.thinking_budget.end_token], [_CERTAIN])
        if p.min_tokens and _too_short(row) and row.constraint is None:  # a constraint knows where it can only end
            additions.add(i, list(p.stop_token_ids), [-math.inf] * len(p.stop_token_ids))
    return factors.changes(len(rows)), additions.changes(len(rows))


class _Entries:
    """Collects a number for each of some tokens, row by row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[int] = []
        self._tokens: list[npt.NDArray[np.int64]] = []
        self._numbers: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, token_ids: npt.ArrayLike, numbers: npt.ArrayLike) -> None:
        """Adds numbers of a row's tokens. Drops ids outside the vocabulary, which can't be chosen."""
        ids, values = np.asarray(token_ids, dtype=np.int64), np.asarray(numbers, dtype=np.float32)
        known = (ids >= 0) & (ids < self._vocab_size)
        self._rows.append(row)
        self._tokens.append(ids[known])
        self._numbers.append(values[known])

    def changes(self, rows: int) -> Changes | None:
        """Returns all; None if there are none."""
        if not self._rows:
            return None
        starts = np.zeros(rows + 1, np.int64)
        np.add.at(starts, np.array(self._rows) + 1, [len(ids) for ids in self._tokens])
        return Changes(starts.cumsum(), np.concatenate(self._tokens), np.concatenate(self._numbers))
