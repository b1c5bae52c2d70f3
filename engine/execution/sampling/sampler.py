"""Samples tokens from logits.

Order of operations:

    1. log-probabilities of the model's own distribution
    2. repetition, presence and frequency penalties, logit bias, thinking budgets, masks of `min_tokens` and grammars
    3. temperature, top-k, top-p, min-p, and the draw (engine/ops/draw.py)

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
from engine.ops.draw import Draws
from engine.ops.threads import few_threads
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
            logits: Output of the model in any floating type; float32 is overwritten. [R, V]
            rows: How to choose each token; at least one row. [R]
        """
        if all(row.params.takes_most_likely and row.constraint is None for row in rows):
            return ChosenTokens(self._ops.top_k(logits, 1)[1].flatten())
        params = [row.params for row in rows]
        with_logprobs = [i for i, p in enumerate(params) if p.top_logprobs is not None]
        raw_logprobs = None
        with few_threads(logits):
            if with_logprobs:
                raw_logprobs = torch.log_softmax(take(logits, with_logprobs), dim=-1, dtype=torch.float32)
            if any(_adjusts(row) for row in rows):
                logits = logits.float()
                _adjust(logits, rows)
        if constrained := [i for i, row in enumerate(rows) if row.constraint is not None]:
            self._constrain(logits, rows, constrained)
        chosen = self._ops.draw(logits, _draws(rows))
        if raw_logprobs is None:
            return ChosenTokens(chosen)
        tops = [params[i].top_logprobs or 0 for i in with_logprobs]
        best, ids = self._ops.top_k(raw_logprobs, max(1, min(max(tops), self._vocab_size)))
        replacements = [None if c is None else c.replacement() for c in (rows[i].constraint for i in with_logprobs)]
        others = upload_indices([token or 0 for token in replacements], chosen.device)
        own = torch.stack([take(chosen, with_logprobs), others], dim=1)
        return ChosenTokens(chosen, with_logprobs, tops, replacements, (raw_logprobs.gather(1, own), best, ids))

    def _constrain(self, logits: Tensor, rows: Sequence[SampleRow], constrained: Sequence[int]) -> None:
        """Masks the tokens that the grammars of these rows do not allow, in place. [R, V]"""
        masks = np.empty((len(constrained), (logits.shape[1] + 31) // 32), np.int32)
        for i, index in enumerate(constrained):
            row = rows[index]
            assert row.constraint is not None
            masks[i] = row.constraint.mask(may_end=not _too_short(row))
        indices, of_rows = upload_indices(constrained, logits.device), upload(torch.from_numpy(masks), logits.device)
        self._ops.mask_logits(logits, indices, of_rows)


def _draws(rows: Sequence[SampleRow]) -> Draws:
    params = [row.params for row in rows]
    return Draws(
        np.array([p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params], np.float32),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        _row_keys(rows),
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


def _adjusts(row: SampleRow) -> bool:
    """True if `_adjust` would change the row."""
    p = row.params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or _must_end_thinking(row)
        or (p.min_tokens and row.constraint is None and _too_short(row))
    )


def _must_end_thinking(row: SampleRow) -> bool:
    """True if the next token must end the output's reasoning."""
    budget = row.params.thinking_budget
    return budget is not None and budget.must_end(row.tokens[row.prompt_len :])


def _too_short(row: SampleRow) -> bool:
    """True if the output has fewer than `min_tokens` tokens."""
    return row.position - row.prompt_len < row.params.min_tokens


def _adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies penalties, bias, thinking budgets and the mask of `min_tokens` in place, touching only the tokens
    concerned. [R, V]"""
    scaled, shifted = _Entries(logits), _Entries(logits)
    for i, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1.0:
            ids, _ = row.counts.tokens.of(row.tokens)
            scaled.add(i, ids, np.full(len(ids), p.repetition_penalty))  # once for each distinct token
        if p.presence_penalty or p.frequency_penalty:
            ids, counts = row.counts.outputs.of(row.tokens, row.prompt_len)
            shifted.add(i, ids, -(p.frequency_penalty * counts + p.presence_penalty))
        if p.logit_bias:
            shifted.add(i, list(p.logit_bias), list(p.logit_bias.values()))
        if p.thinking_budget is not None and _must_end_thinking(row):
            shifted.add(i, [p.thinking_budget.end_token], [_CERTAIN])
        if _too_short(row) and row.constraint is None:  # a constraint knows where the output can only end
            shifted.add(i, list(p.stop_token_ids), [-math.inf] * len(p.stop_token_ids))
    flat = logits.view(-1)
    if entries := scaled.tensors():
        where, factor = entries
        old = flat[where]
        flat[where] = torch.where(old > 0, old / factor, old * factor)
    if entries := shifted.tensors():
        flat.index_add_(0, *entries)


class _Entries:
    """Collects (row, token, number) triples for one operation over all rows."""

    def __init__(self, logits: Tensor) -> None:
        self._vocab_size, self._device = logits.shape[1], logits.device
        self._where: list[npt.NDArray[np.int64]] = []
        self._numbers: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, token_ids: npt.ArrayLike, numbers: npt.ArrayLike) -> None:
        """Adds numbers of a row's tokens. Drops ids outside the vocabulary, which can't be chosen."""
        ids, values = np.asarray(token_ids, dtype=np.int64), np.asarray(numbers, dtype=np.float32)
        known = (ids >= 0) & (ids < self._vocab_size)
        self._where.append(row * self._vocab_size + ids[known])
        self._numbers.append(values[known])

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Returns flat indices and numbers; None if there are none."""
        if not self._where:
            return None
        where, numbers = np.concatenate(self._where), np.concatenate(self._numbers)
        return upload(torch.from_numpy(where), self._device), upload(torch.from_numpy(numbers), self._device)
