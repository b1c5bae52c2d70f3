"""Samples tokens from logits.

Order of operations:

    1. log-probabilities of the model's own distribution
    2. repetition, presence and frequency penalties, logit bias, thinking budgets, masks of `min_tokens` and grammars
    3. temperature
    4. top-k, top-p, min-p, each on what the previous one left, as in vLLM
    5. the token with the largest logit + Gumbel noise: a draw from the softmax (the Gumbel-max trick)

On a CPU, rows with a small top-k take steps 3 to 5 on their best tokens only.

The noise of a token is a hash of (seed, choice, position, token id), not a generator's state. So a request gets the
same tokens in any batch, any order of steps and on any worker.

On a GPU only `ChosenTokens.read` waits for the device. The masks of grammars are computed on the host while the device
computes the logits (that has not run on a GPU yet).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import Sampled, SampleRow
from engine.ops.base import Ops
from engine.ops.buffers import upload
from engine.ops.torch_ops import TorchOps
from engine.types import GREEDY_BELOW, SamplingParams, TokenLogprobs

FEW_LOGITS = 1 << 20
"""On a CPU, fewer logits than this are sampled on one thread."""

MAX_SHORTLIST = 1024
"""Longest shortlist. It has 2 · top-k tokens, so that ties with the k-th fit too."""

_UINT_TO_UNIT = (1 - 2**-24) * 2**-31  # the largest 31-bit number stays below 1 after rounding to float32
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
    """Samples one token per row. Its only state is a hash of every token id, for the noise."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", ops: Ops | None = None) -> None:
        self._vocab_size = vocab_size
        self._ops = TorchOps() if ops is None else ops
        self._token_keys = _token_keys(vocab_size).to(device)

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
        if logits.device.type == "cpu" and logits.numel() < FEW_LOGITS:
            with _one_thread():
                return self._choose(logits, rows)
        return self._choose(logits, rows)

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> ChosenTokens:
        params = [row.params for row in rows]
        drawn = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
        with_logprobs = [i for i, p in enumerate(params) if p.top_logprobs is not None]
        raw_logprobs = None
        if with_logprobs:
            logits = logits.float()
            raw_logprobs = torch.log_softmax(_take(logits, with_logprobs), dim=-1)
        if any(_adjusts(row) for row in rows):
            logits = logits.float()
            _adjust(logits, rows)
        if constrained := [i for i, row in enumerate(rows) if row.constraint is not None]:
            self._constrain(logits, rows, constrained)
        if len(drawn) == len(rows):
            chosen = self._draw(logits, rows)
        else:
            chosen = self._ops.top_k(logits, 1)[1].flatten()
            if drawn:
                chosen[_index(drawn, logits)] = self._draw(_take(logits, drawn), [rows[i] for i in drawn])
        if raw_logprobs is None:
            return ChosenTokens(chosen)
        tops = [params[i].top_logprobs or 0 for i in with_logprobs]
        best = torch.topk(raw_logprobs, min(max(tops), self._vocab_size), dim=-1)
        replacements = [None if c is None else c.replacement() for c in (rows[i].constraint for i in with_logprobs)]
        own = torch.stack([_take(chosen, with_logprobs), _index([token or 0 for token in replacements], chosen)], dim=1)
        return ChosenTokens(
            chosen, with_logprobs, tops, replacements, (raw_logprobs.gather(1, own), best.values, best.indices)
        )

    def _constrain(self, logits: Tensor, rows: Sequence[SampleRow], constrained: Sequence[int]) -> None:
        """Masks the tokens that the grammars of these rows do not allow, in place. [R, V]"""
        masks = np.empty((len(constrained), (logits.shape[1] + 31) // 32), np.int32)
        for i, index in enumerate(constrained):
            row = rows[index]
            assert row.constraint is not None
            masks[i] = row.constraint.mask(may_end=not _too_short(row))
        self._ops.mask_logits(logits, _index(constrained, logits), upload(torch.from_numpy(masks), logits.device))

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Draws from the tempered and filtered distribution. [R, V] -> [R] int64; overwrites float32 `logits`."""
        if logits.device.type != "cpu":  # checking that a shortlist suffices would wait for the device
            return self._draw_from(logits, None, rows)
        short = [i for i, row in enumerate(rows) if 0 < 2 * row.params.top_k <= min(MAX_SHORTLIST, self._vocab_size)]
        if not short:
            return self._draw_from(logits, None, rows)
        best, ids = self._ops.top_k(_take(logits, short), 2 * max(rows[i].params.top_k for i in short))
        kth = best.gather(1, torch.tensor([[rows[i].params.top_k - 1] for i in short]))
        complete = (best[:, -1:] < kth).flatten()  # otherwise tokens as likely as the k-th may be missing
        listed = [i for i, is_complete in zip(short, complete.tolist(), strict=True) if is_complete]
        if len(listed) == len(rows):
            return self._draw_from(best, ids, rows)
        chosen = torch.empty(len(rows), dtype=torch.int64)
        if listed:
            chosen[listed] = self._draw_from(best[complete], ids[complete], [rows[i] for i in listed])
        rest = sorted(set(range(len(rows))).difference(listed))
        chosen[rest] = self._draw_from(logits[rest], None, [rows[i] for i in rest])
        return chosen

    def _draw_from(self, logits: Tensor, ids: Tensor | None, rows: Sequence[SampleRow]) -> Tensor:
        """Draws a token for each row, from some tokens or all. Overwrites float32 `logits`.

        argmax(logit + noise) = argmax(probability / E), as noise = -log(E) with an exponentially distributed E. That
        saves a logarithm per token.

        Args:
            logits: [R, N]
            ids: Token ids of the columns; None for the whole vocabulary. [R, N]

        Returns:
            Token ids. [R] int64
        """
        params = [row.params for row in rows]
        logits = logits.float()
        if any(p.temperature != 1.0 for p in params):
            logits.div_(_column([p.temperature for p in params], logits))
        _filter(logits, params, descending=ids is not None)
        keys = _row_keys(rows)
        token_keys = self._token_keys if ids is None else self._token_keys[ids]
        race = torch.softmax(logits, dim=-1).div_(_minus_exponential(token_keys, upload(keys, logits.device)))
        winner = race.argmin(dim=-1)
        return winner if ids is None else ids.gather(1, winner[:, None]).flatten()


def _minus_exponential(token_keys: Tensor, row_keys: Tensor) -> Tensor:
    """Computes -E for each row and token, E being exponentially distributed. [V] or [R, V], [R, 2] -> [R, V] float32

    E comes from a multiply-xorshift-multiply hash in 32-bit arithmetic, which wraps around alike on every device.
    Values near 0, which decide, have the finest resolution: 2^-32.
    """
    bits = torch.bitwise_xor(token_keys, row_keys[:, :1])
    bits *= row_keys[:, 1:]
    bits ^= bits >> 16
    bits *= 0x2C1B3C6D
    bits &= 0x7FFFFFFF
    half = torch.full((), -0.5 * _UINT_TO_UNIT, dtype=torch.float32, device=bits.device)
    return torch.add(half, bits, alpha=-_UINT_TO_UNIT).log1p_()


def _token_keys(vocab_size: int) -> Tensor:
    """Hashes each token id to a different 32-bit number (a bijective hash). [V] int32"""
    x = np.arange(vocab_size, dtype=np.uint32)
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    x ^= x >> 16
    return torch.from_numpy(x.view(np.int32))


def _row_keys(rows: Sequence[SampleRow]) -> Tensor:
    """Computes two 32-bit keys for each row, the second one odd. [R, 2] int32"""
    states = np.array([_choice_state(row.params.seed, row.choice) for row in rows], dtype=np.uint64)
    keys = _mix(states + np.array([row.position for row in rows], dtype=np.uint64)).view(np.int32).reshape(-1, 2)
    keys[:, 1] |= 1
    return torch.from_numpy(keys)


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


def _take(rows: Tensor, indices: Sequence[int]) -> Tensor:
    """Returns these rows; the tensor itself if they are all of them."""
    return rows if len(indices) == len(rows) else rows[_index(indices, rows)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch's operations on this thread alone.

    Its threads wait for each other after every operation. If another process has the core of one, they wait for that
    process, too: each of the dozen operations of a step, for milliseconds. The kernels' own threads do not.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _index(indices: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return upload(torch.tensor(indices), like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.float32)[:, None], like.device)


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


def _filter(logits: Tensor, params: Sequence[SamplingParams], *, descending: bool) -> None:
    """Masks tokens that top-k, top-p or min-p exclude, in place. [R, V]

    Every filter keeps the logits from some smallest one up, so that ties stay together.

    Args:
        descending: The logits of each row are in descending order.
    """
    vocab_size = logits.shape[1]
    floor = torch.full((len(params), 1), -math.inf, device=logits.device)
    if by_k := [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]:
        best = _take(logits, by_k)
        if not descending:
            best = torch.topk(best, max(params[i].top_k for i in by_k), dim=-1).values
        kth = best.gather(1, _index([[params[i].top_k - 1] for i in by_k], logits))
        floor = kth if len(by_k) == len(params) else floor.index_put((_index(by_k, logits),), kth)
    if by_p := [i for i, p in enumerate(params) if p.top_p < 1.0]:
        where = _index(by_p, logits)
        left = _take(logits, by_p)
        left = left.masked_fill(left < floor[where], -math.inf)
        nucleus = _nucleus_floor(left, _column([params[i].top_p for i in by_p], logits))
        floor[where] = torch.maximum(floor[where], nucleus)
    if by_min := [i for i, p in enumerate(params) if p.min_p > 0.0]:
        where = _index(by_min, logits)
        least = _column([math.log(params[i].min_p) for i in by_min], logits)
        floor[where] = torch.maximum(floor[where], _take(logits, by_min).amax(dim=-1, keepdim=True) + least)
    if by_k or by_p or by_min:
        logits.masked_fill_(logits < floor, -math.inf)


def _nucleus_floor(logits: Tensor, top_p: Tensor) -> Tensor:
    """Finds the smallest logit in the smallest set of tokens with a total probability of `top_p`.

    [R, V], [R, 1] -> [R, 1]
    """
    if logits.device.type == "cpu":  # numpy's vectorised sort is 10 times as fast as torch's
        ordered = torch.from_numpy(np.sort(logits.numpy(), axis=-1))
    else:
        ordered = logits.sort(dim=-1).values
    mass_up_to = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    first = (mass_up_to <= 1 - top_p).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    return ordered.gather(1, first)
