"""The kernels' draws against those of torch. The sampler's tests compare both with the definition."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.ops.cpu_ops import CpuOps
from engine.ops.draw import Changes, Draws
from engine.ops.torch_ops import TorchOps

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("vocab", [1, 2, 15, 61, 128, 500, 4099, 151_936])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_draws_are_those_of_torch(ops: CpuOps, threads: int, vocab: int, dtype: torch.dtype, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    rows = 24

    def column(values: list[float], dtype: Any = np.float32) -> npt.NDArray[Any]:
        return rng.choice(values, rows).astype(dtype)

    draws = Draws(
        column([0, 0.3, 0.7, 1, 2]),
        column([0, 0, 1, 3, 20, 5000, 1 << 32], np.int64),
        column([1, 1, 0.999, 0.9, 0.5, 1e-9]),
        column([0, 0, 0.01, 0.5, 1]),
        rng.integers(-(1 << 31), 1 << 31, (rows, 2)).astype(np.int32) | np.array([0, 1], np.int32),
    )
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread).to(dtype)
    logits[1:5, : vocab // 2] = -torch.inf
    for changed in (draws, replace(draws, factors=changes(rng, rows, vocab), additions=changes(rng, rows, vocab))):
        got = ops.draw(logits.clone(), changed)
        assert torch.equal(got, TorchOps().draw(logits.clone(), changed))
        assert (vocab == 1) or len(set(got.tolist())) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 61), (2, 4099), (9, 151_936)])
def test_the_logarithm_of_a_sum_is_that_of_torch(
    ops: CpuOps, threads: int, rows: int, vocab: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 5).to(dtype)
    x[0, : vocab // 2] = -torch.inf
    torch.testing.assert_close(ops.log_sum_exp(x), torch.logsumexp(x.double(), dim=-1).float(), rtol=1e-6, atol=1e-6)


def changes(rng: np.random.Generator, rows: int, vocab: int) -> Changes:
    """Changes some of the logits of half of the rows."""
    tokens = [rng.permutation(vocab)[: vocab // 3 if row % 2 else 0] for row in range(rows)]
    starts = np.cumsum([0, *map(len, tokens)])
    return Changes(starts, np.concatenate(tokens), rng.uniform(0.5, 2, starts[-1]).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_any_likely_token_gets_the_first_one(ops: CpuOps, dtype: torch.dtype) -> None:
    logits = torch.full((4, 300), -torch.inf, dtype=dtype)
    logits[1] = torch.nan
    logits[2, 7], logits[2, 9] = torch.nan, 1.0
    logits[3, 299] = -80.0
    ones, keys = np.ones(4, np.float32), np.ones((4, 2), np.int32)
    tokens = ops.draw(logits, Draws(ones, np.zeros(4, np.int64), ones * 0.5, ones * 0.1, keys))
    assert tokens.tolist() == [0, 0, 9, 299]
