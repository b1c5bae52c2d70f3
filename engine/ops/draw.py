"""Draws tokens from logits, in plain torch: the reference, and what GPUs run.

Order of operations: changes of single logits; temperature; top-k, top-p, min-p, each on what the previous one left, as
in vLLM; then the token with the largest logit + Gumbel noise, which is a draw from the softmax (the Gumbel-max trick).

The noise of a token is a hash of (the row's keys, token id), not a generator's state. So a row gets the same token in
any batch, on any worker. `engine/ops/kernels/draw.h` computes the same noise.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops.buffers import take, upload, upload_indices

_UINT_TO_UNIT = (1 - 2**-24) * 2**-31  # the largest 31-bit number stays below 1 after rounding to float32


@dataclass(frozen=True, slots=True)
class Changes:
    """A number for each of some tokens of some rows, one row after the other.

    Attributes:
        starts: Row r has the entries from `starts[r]` up to `starts[r + 1]`. [R + 1] int64
        tokens: Within the vocabulary. [N] int64
        numbers: [N] float32
    """

    starts: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draws:
    """How to draw a token for each row.

    Attributes:
        temperatures: 0 takes the most likely token. [R] float32
        top_k: 0 keeps all tokens. [R] int64
        top_p: 1 keeps all tokens. [R] float32
        min_p: 0 keeps all tokens. [R] float32
        keys: Of the noise; the second one is odd. [R, 2] int32
        factors: Positive logits of these tokens are divided, others multiplied. A token occurs once in a row.
        additions: Added to the logits of these tokens, after that.
    """

    temperatures: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    keys: npt.NDArray[np.int32]
    factors: Changes | None = None
    additions: Changes | None = None


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draws a token for each row. [R, V] -> [R] int64

    argmax(logit + noise) = argmax(probability / E), as noise = -log(E) with an exponentially distributed E. That saves
    a logarithm per token.
    """
    logits = logits.to(torch.float32, copy=True)
    _change(logits, draws)
    drawn = draws.temperatures > 0
    likeliest = None if drawn.all() else logits.max(dim=-1).indices
    temperatures = np.where(drawn, draws.temperatures, np.float32(1))
    if (temperatures != 1).any():
        logits.div_(_column(temperatures, logits))
    _filter(logits, draws)
    keys = upload(torch.from_numpy(draws.keys), logits.device)
    noise = minus_exponential(token_keys(logits.shape[1], logits.device), keys)
    chosen = torch.softmax(logits, dim=-1).div_(noise).argmin(dim=-1)
    if likeliest is None:
        return chosen
    return torch.where(upload(torch.from_numpy(drawn), logits.device), chosen, likeliest)


def minus_exponential(token_keys: Tensor, row_keys: Tensor) -> Tensor:
    """Computes -E for each row and token, E being exponentially distributed. [V], [R, 2] -> [R, V] float32

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


@lru_cache(maxsize=8)
def token_keys(vocab_size: int, device: torch.device) -> Tensor:
    """Hashes each token id to a different 32-bit number (a bijective hash). [V] int32"""
    x = np.arange(vocab_size, dtype=np.uint32)
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    x ^= x >> 16
    return torch.from_numpy(x.view(np.int32)).to(device)


def _change(logits: Tensor, draws: Draws) -> None:
    """Changes single logits in place. [R, V]"""
    flat = logits.view(-1)
    if draws.factors is not None:
        where, factor = _entries(draws.factors, logits)
        old = flat[where]
        flat[where] = torch.where(old > 0, old / factor, old * factor)
    if draws.additions is not None:
        flat.index_add_(0, *_entries(draws.additions, logits))


def _entries(changes: Changes, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns indices into all logits, and the numbers."""
    rows = np.repeat(np.arange(len(logits)), np.diff(changes.starts))
    numbers = upload(torch.from_numpy(changes.numbers), logits.device)
    return upload_indices(rows * logits.shape[1] + changes.tokens, logits.device), numbers


def _filter(logits: Tensor, draws: Draws) -> None:
    """Masks tokens that top-k, top-p or min-p exclude, in place. [R, V]

    Every filter keeps the logits from some smallest one up, so that ties stay together.
    """
    rows, vocab_size = logits.shape
    floor = torch.full((rows, 1), -math.inf, device=logits.device)
    by_k = np.flatnonzero((draws.top_k > 0) & (draws.top_k < vocab_size))
    by_p = np.flatnonzero(draws.top_p < 1)
    by_min = np.flatnonzero(draws.min_p > 0)
    if len(by_k):
        top_k = draws.top_k[by_k]
        best = torch.topk(take(logits, by_k), int(top_k.max()), dim=-1).values
        kth = best.gather(1, upload_indices(top_k[:, None] - 1, logits.device))
        floor = kth if len(by_k) == rows else floor.index_put((upload_indices(by_k, logits.device),), kth)
    if len(by_p):
        where = upload_indices(by_p, logits.device)
        left = take(logits, by_p)
        left = left.masked_fill(left < floor[where], -math.inf)
        nucleus = _nucleus_floor(left, _column(draws.top_p[by_p], logits))
        floor[where] = torch.maximum(floor[where], nucleus)
    if len(by_min):
        where = upload_indices(by_min, logits.device)
        least = _column(np.log(draws.min_p[by_min]), logits)
        floor[where] = torch.maximum(floor[where], take(logits, by_min).amax(dim=-1, keepdim=True) + least)
    if len(by_k) or len(by_p) or len(by_min):
        logits.masked_fill_(logits < floor, -math.inf)


def _nucleus_floor(logits: Tensor, top_p: Tensor) -> Tensor:
    """Finds the smallest logit in the smallest set of tokens with a total probability of `top_p`.

    [R, V], [R, 1] -> [R, 1]
    """
    ordered = logits.sort(dim=-1).values
    mass_up_to = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
    first = (mass_up_to <= 1 - top_p).sum(dim=-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    return ordered.gather(1, first)


def _column(values: npt.NDArray[np.float32], like: Tensor) -> Tensor:
    return upload(torch.from_numpy(values[:, None]), like.device)
