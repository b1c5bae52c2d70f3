"""Weights of 8 and 4 bits: how far they are from what was quantised, and numbers that have no scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.quantized import GROUP, QuantizedWeight, joined, quantize

BITS = [8, 4]


def random_weight(seed: int, rows: int, groups: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed)) * size


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    bits=st.sampled_from(BITS),
)
def test_no_element_moves_by_more_than_half_a_step(seed: int, rows: int, groups: int, size: float, bits: int) -> None:
    weight = random_weight(seed, rows, groups, size)
    quantized = quantize(weight, bits)
    error = (quantized.dequantize() - weight).view(rows, -1, GROUP).abs().amax(-1)
    # With 4 bits there are 8 steps below zero and 7 above: the largest of the other sign may be cut by a whole step.
    step = quantized.scales.float().abs()
    rounding = torch.maximum(step * 2**-11, torch.tensor(2**-25))  # of scales to float16, where small ones are coarse
    assert (error <= step * (0.5 if bits == 8 else 1.0) + 127 * rounding).all()


@pytest.mark.parametrize("bits", BITS)
def test_groups_have_their_own_scales(bits: int) -> None:
    weight = random_weight(0, 3, 4)
    weight[1, GROUP : 2 * GROUP] *= 1000
    others = weight.view(3, -1, GROUP).abs().amax(-1) < 100
    error = (quantize(weight, bits).dequantize() - weight).view(3, -1, GROUP).abs().amax(-1)
    assert error[others].max() < (0.03 if bits == 8 else 0.6)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros(bits: int) -> None:
    assert not quantize(torch.zeros(2, 64), bits).dequantize().any()


@pytest.mark.parametrize("bits", BITS)
def test_large_weights_are_quantised_in_pieces(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(1, 50, 3)
    whole = quantize(weight, bits)
    monkeypatch.setattr("engine.ops.quantized._AT_ONCE", 7 * 96)
    assert torch.equal(quantize(weight, bits).dequantize(), whole.dequantize())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_numbers_without_a_scale_are_refused(bits: int, number: float) -> None:
    weight = random_weight(2, 3, 2)
    weight[2, 40] = number
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize(weight, bits)


@pytest.mark.parametrize("bits", BITS)
def test_joined_weights_keep_their_numbers(bits: int) -> None:
    parts = [quantize(random_weight(seed, 4 + seed, 2), bits) for seed in range(3)]
    assert torch.equal(joined(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_minima_are_subtracted() -> None:
    values = torch.arange(64, dtype=torch.uint8).view(1, 64) % 16
    scales, minima = torch.tensor([[2.0, 0.5]]).half(), torch.tensor([[1.0, -3.0]]).half()
    weight = QuantizedWeight(4, values, scales, minima)
    expected = torch.cat([values[:, :32] * 2.0 - 1.0, values[:, 32:] * 0.5 + 3.0], dim=1)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(joined([weight, weight]).dequantize(), expected.expand(2, -1))
