"""From logits to tokens.

Order: log-probabilities of the model's own distribution; repetition, presence and frequency penalties, logit bias,
the mask of `min_tokens`; temperature; top-k, top-p and min-p (as in vLLM: each on what the one before left); then the
token with the largest `logit + Gumbel noise`, which is a draw from the softmax (the Gumbel-max trick). On a CPU, rows
with a small top-k are filtered and drawn among their best tokens only.

The noise of a token is a hash of (seed, choice, position, token id), not the state of a generator. So a request gets
the same tokens alone, in any batch, in any order of steps and on any worker.

On a GPU nothing here waits for the device but `Chosen.read`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import Sampled, SampleRow
from engine.ops.buffers import upload
from engine.types import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token: dividing by them would overflow."""

MAX_SHORTLIST = 1024
"""Rows whose top-k is at most half of this are drawn from a shortlist of twice as many tokens: room for ties."""

_BLOCK = 64
"""Neighbouring tokens of which only the best is looked at first: most blocks hold none of the best tokens."""

_UINT_TO_UNIT = (1 - 2**-24) * 2**-31  # the largest 31-bit number stays below 1 after rounding to float32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Sampled tokens, while they may still be computed.

    Attributes:
        token_ids: int64 [R]
        reported: The rows that asked for log-probabilities. L of them.
        tops: How many alternatives each of those asked for. [L]
        logprobs: Of the chosen tokens [L]; of the most likely ones [L, max(tops)], and which those are. None if L is 0.
    """

    token_ids: Tensor
    reported: Sequence[int] = ()
    tops: Sequence[int] = ()
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None

    def to_host(self) -> Self:
        """Starts copying everything into pinned memory, ordered after what the current stream has to do.

        Read it when that stream has come so far. On a CPU it is there already.
        """

        def copied(tensor: Tensor) -> Tensor:
            return tensor.to("cpu", non_blocking=True)

        logprobs = None
        if self.logprobs is not None:
            of_chosen, best, ids = self.logprobs
            logprobs = copied(of_chosen), copied(best), copied(ids)
        return replace(self, token_ids=copied(self.token_ids), logprobs=logprobs)

    def read(self) -> list[Sampled]:
        """One a row."""
        sampled = [Sampled(token_id) for token_id in self.token_ids.tolist()]
        if self.logprobs is not None:
            of_chosen, best, ids = (tensor.tolist() for tensor in self.logprobs)
            for row, top, own, values, tokens in zip(self.reported, self.tops, of_chosen, best, ids, strict=True):
                sampled[row].logprobs = TokenLogprobs(own, list(zip(tokens[:top], values[:top], strict=True)))
        return sampled


class Sampler:
    """Samples one token a row. Holds only constants: the scrambled token ids that the noise is made of."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._token_keys = _token_keys(vocab_size).to(device)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """As `choose`, and waits for the tokens. There may be no rows."""
        return self.choose(logits, rows).read() if rows else []

    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
        """Chooses a token for each row.

        Args:
            logits: The model's output, one row a sample row, any floating type. float32 is overwritten. [R, V]
            rows: How to choose. At least one. [R]
        """
        params = [row.params for row in rows]
        drawn = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
        reported = [i for i, p in enumerate(params) if p.top_logprobs is not None]
        if not drawn and not reported and not any(_adjusts(row) for row in rows):
            return Chosen(logits.max(dim=-1).indices)  # argmax of bfloat16 is four times slower on a CPU
        logits = logits.float()
        raw_logprobs = torch.log_softmax(_take(logits, reported), dim=-1) if reported else None
        _adjust(logits, rows)
        if len(drawn) == len(rows):
            chosen = self._draw(logits, rows)
        else:
            chosen = torch.argmax(logits, dim=-1)
            if drawn:
                chosen[_index(drawn, logits)] = self._draw(_take(logits, drawn), [rows[i] for i in drawn])
        if raw_logprobs is None:
            return Chosen(chosen)
        tops = [params[i].top_logprobs or 0 for i in reported]
        best = torch.topk(raw_logprobs, min(max(tops), self._vocab_size), dim=-1)
        of_chosen = raw_logprobs.gather(1, _take(chosen, reported)[:, None]).flatten()
        return Chosen(chosen, reported, tops, (of_chosen, best.values, best.indices))

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Draws from the tempered and filtered distribution. [R, V] -> [R] int64; overwrites `logits`."""
        if logits.device.type != "cpu":  # whether a shortlist is enough could be told only by waiting for the device
            return self._draw_from(logits, None, rows)
        short = [i for i, row in enumerate(rows) if 0 < 2 * row.params.top_k <= min(MAX_SHORTLIST, self._vocab_size)]
        if not short:
            return self._draw_from(logits, None, rows)
        chosen = torch.empty(len(rows), dtype=torch.int64)
        best, ids = _best(_take(logits, short), 2 * max(rows[i].params.top_k for i in short))
        kth = best.gather(1, torch.tensor([[rows[i].params.top_k - 1] for i in short]))
        whole = (best[:, -1:] < kth).flatten()  # else tokens as likely as the k-th may be missing
        enough = [i for i, fits in zip(short, whole.tolist(), strict=True) if fits]
        if enough:
            chosen[enough] = self._draw_from(best[whole], ids[whole], [rows[i] for i in enough])
        if rest := sorted(set(range(len(rows))).difference(enough)):
            chosen[rest] = self._draw_from(logits[rest], None, [rows[i] for i in rest])
        return chosen

    def _draw_from(self, logits: Tensor, ids: Tensor | None, rows: Sequence[SampleRow]) -> Tensor:
        """Draws a token for each row, among some tokens or all. Overwrites `logits`.

        The largest `logit + noise` is found as the largest `probability / E`, since the noise is -log(E) with an
        exponentially distributed E: that saves a logarithm of every token.

        Args:
            logits: [R, N]
            ids: The tokens that they belong to; None: the whole vocabulary. [R, N]

        Returns:
            Token ids. [R] int64
        """
        params = [row.params for row in rows]
        if any(p.temperature != 1.0 for p in params):
            logits.div_(_column([p.temperature for p in params], logits))
        _filter(logits, params)
        keys = _row_keys([p.seed for p in params], [r.choice for r in rows], [r.position for r in rows])
        token_keys = self._token_keys if ids is None else self._token_keys[ids]
        race = torch.softmax(logits, dim=-1).div_(_minus_exponential(token_keys, upload(keys, logits.device)))
        winner = race.argmin(dim=-1)
        return winner if ids is None else ids.gather(1, winner[:, None]).flatten()


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, descending, and their columns. [R, V] -> [R, count] twice

    The `count` best tokens are in the `count` blocks with the best maxima, or behind the last whole block.
    """
    num_rows, size = logits.shape
    blocks = size // _BLOCK
    if blocks <= 2 * count:
        return torch.topk(logits, count, dim=-1)
    by_block = logits[:, : blocks * _BLOCK].view(num_rows, blocks, _BLOCK)
    chosen = torch.topk(by_block.amax(dim=-1), count, dim=-1, sorted=False).indices
    columns = (chosen[:, :, None] * _BLOCK + torch.arange(_BLOCK)).view(num_rows, -1)
    rest = torch.arange(blocks * _BLOCK, size).expand(num_rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    values, places = torch.topk(logits.gather(1, columns), count, dim=-1)
    return values, columns.gather(1, places)


def gumbel_noise(seed: int, choice: int, position: int, vocab_size: int) -> Tensor:
    """The noise that is added to the (tempered) logits of the token at `position`. [vocab_size] float32

    Tests use it as an oracle: a sampled token is the argmax of logits / temperature + noise.
    """
    keys = _row_keys([seed], [choice], [position])
    return _minus_exponential(_token_keys(vocab_size), keys)[0].neg_().log_().neg_()


def _minus_exponential(token_keys: Tensor, row_keys: Tensor) -> Tensor:
    """Minus the exponentially distributed variable of each row and token. [V] or [R, V], [R, 2] -> [R, V] float32,
    all < 0

    A multiply-xorshift-multiply hash in 32-bit arithmetic, which wraps around in the same way on every device. It
    is mapped so that the numbers near 0, which decide, have the finest resolution: down to 2^-32.
    """
    bits = torch.bitwise_xor(token_keys, row_keys[:, :1])
    bits *= row_keys[:, 1:]
    bits ^= bits >> 16
    bits *= 0x2C1B3C6D
    bits &= 0x7FFFFFFF
    half = torch.full((), -0.5 * _UINT_TO_UNIT, dtype=torch.float32, device=bits.device)
    return torch.add(half, bits, alpha=-_UINT_TO_UNIT).log1p_()


def _token_keys(vocab_size: int) -> Tensor:
    """A different 32-bit number for each token id, well scrambled (a bijective hash). [V] int32"""
    x = np.arange(vocab_size, dtype=np.uint32)
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    x ^= x >> 16
    return torch.from_numpy(x.view(np.int32))


def _row_keys(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Two 32-bit keys a row, the second one odd. [R, 2] int32"""
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    for numbers in (choices, positions):
        state = _mix(state) + np.array(numbers, dtype=np.uint64)
    keys = _mix(state).view(np.int32).reshape(-1, 2)
    keys[:, 1] |= 1
    return torch.from_numpy(keys)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _take(rows: Tensor, indices: Sequence[int]) -> Tensor:
    """Those rows; the tensor itself when they are all."""
    return rows if len(indices) == len(rows) else rows[_index(indices, rows)]


def _index(indices: Sequence[int], like: Tensor) -> Tensor:
    return upload(torch.tensor(indices), like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.float32)[:, None], like.device)


def _adjusts(row: SampleRow) -> bool:
    """Whether `_adjust` would do anything."""
    p = row.params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or row.position - row.prompt_len < p.min_tokens
    )


def _adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies penalties, bias and the mask of `min_tokens` in place. Touches only the tokens concerned. [R, V]"""
    scaled, shifted = _Entries(logits), _Entries(logits)
    for i, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1.0:
            ids, _ = row.counts.tokens.of(row.tokens)
            scaled.add(i, ids, np.full(len(ids), p.repetition_penalty))  # once, however often it came
        if p.presence_penalty or p.frequency_penalty:
            ids, counts = row.counts.outputs.of(row.tokens, row.prompt_len)
            shifted.add(i, ids, -(p.frequency_penalty * counts + p.presence_penalty))
        if p.logit_bias:
            shifted.add(i, list(p.logit_bias), list(p.logit_bias.values()))
        if row.position - row.prompt_len < p.min_tokens:
            shifted.add(i, list(p.stop_token_ids), [-math.inf] * len(p.stop_token_ids))
    flat = logits.view(-1)
    if where_by := scaled.tensors():
        where, factor = where_by
        old = flat[where]
        flat[where] = torch.where(old > 0, old / factor, old * factor)
    if where_by := shifted.tensors():
        flat.index_add_(0, *where_by)


class _Entries:
    """(row, token, number) triples, gathered for one operation over all rows."""

    def __init__(self, logits: Tensor) -> None:
        self._vocab_size, self._device = logits.shape[1], logits.device
        self._where: list[npt.NDArray[np.int64]] = []
        self._numbers: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, token_ids: npt.ArrayLike, numbers: npt.ArrayLike) -> None:
        """Ids outside the vocabulary are dropped: they can't be chosen anyway."""
        ids, values = np.asarray(token_ids, dtype=np.int64), np.asarray(numbers, dtype=np.float32)
        known = (ids >= 0) & (ids < self._vocab_size)
        self._where.append(row * self._vocab_size + ids[known])
        self._numbers.append(values[known])

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Flat indices and numbers, or None if there are none."""
        if not self._where:
            return None
        where, numbers = np.concatenate(self._where), np.concatenate(self._numbers)
        return upload(torch.from_numpy(where), self._device), upload(torch.from_numpy(numbers), self._device)


def _filter(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Masks what top-k, top-p and min-p exclude, in place. [R, V]

    Every filter comes down to a smallest logit that is kept; equal ones stay together.
    """
    vocab_size = logits.shape[1]
    floor = torch.full((len(params), 1), -math.inf, device=logits.device)
    if by_k := [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]:
        ks = [params[i].top_k for i in by_k]
        best = torch.topk(_take(logits, by_k), max(ks), dim=-1).values
        floor[_index(by_k, logits)] = best.gather(1, _index(ks, logits)[:, None] - 1)
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
    """The smallest logit in the smallest set of tokens whose probabilities reach `top_p`. [R, V], [R, 1] -> [R, 1]"""
    if logits.device.type == "cpu":  # numpy's sort of floats is vectorised, and 10 times as fast as torch's
        ordered = torch.from_numpy(np.sort(logits.numpy(), axis=-1))
    else:
        ordered = logits.sort(dim=-1).values
    mass_up_to = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    first = (mass_up_to <= 1 - top_p).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    return ordered.gather(1, first)
