"""The CPU kernels for weights of 8 and 4 bits against the same weights in float32."""

import pytest
import torch

from engine.ops.base import Routing, Weight
from engine.ops.cpu_ops import CpuOps, PackedExperts, PackedLinear
from engine.ops.quantized import GROUP, QuantizedWeight, quantize
from engine.ops.torch_ops import TorchOps

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = ["int8", "int4", "int4 with minima"]
SHAPES = [(512, 256, True, 2), (33, 32, False, 1), (7, 64, True, 3), (200, 96, False, 2), (64, 1024, True, 3)]
"""Rows and columns, whether there is a bias, threads."""
EXPERTS = [((8, 8), 1), ((4, 4), 2), ((4, 8), 3), ((8, None), 2), ((None, 4), 3)]
"""Bits of an expert's first and second weight, threads."""


def random_weight(n: int, k: int, name: str) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n + k)
    if name != "int4 with minima":
        return quantize(torch.randn(n, k, generator=generator) / k**0.5, int(name[-1]))
    values = torch.randint(16, (n, k), generator=generator, dtype=torch.uint8)
    scales, minima = torch.rand(2, n, k // GROUP, generator=generator).half() / k**0.5
    return QuantizedWeight(4, values, scales, 8 * minima)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "bias", "threads"), SHAPES, indirect=["threads"])
@pytest.mark.parametrize("name", FORMATS)
def test_activations_of_8_bits_are_multiplied_without_error(
    ops: CpuOps, threads: int, dtype: torch.dtype, n: int, k: int, bias: bool, name: str
) -> None:
    weight, b = random_weight(n, k, name), torch.randn(n).to(dtype) if bias else None
    linear = ops.pack(weight, b)
    assert isinstance(linear, PackedLinear)
    for m in (1, 2, 3, 4, 7, 97, 600):
        x = torch.randint(-127, 128, (m, k)).float()
        x[:, ::GROUP] = 127.0  # every group's scale is a power of two
        x *= 2.0 ** torch.randint(-3, 4, (m, k // GROUP)).repeat_interleave(GROUP, dim=1)
        expected = x.double() @ weight.dequantize().double().T + (0.0 if b is None else b.double())
        tolerance = (2e-6 if dtype == torch.float32 else 4e-3) * expected.abs().max()
        assert (linear(x.to(dtype)).double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_other_activations_add_an_error_below_one_percent(ops: CpuOps, dtype: torch.dtype, name: str) -> None:
    weight, x = random_weight(256, 1024, name), torch.randn(50, 1024).to(dtype)
    expected = TorchOps().pack(weight, None)(x.float())
    error = ops.pack(weight, None)(x).float() - expected
    assert error.norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_beside_others(ops: CpuOps, threads: int, name: str) -> None:
    """Columns are more than a block, and counts of rows those of one tile, of several on a block, and of many."""
    linear, x = ops.pack(random_weight(200, 1056, name), None), torch.randn(300, 1056)
    together = linear(x)
    for begin, count in ((0, 1), (5, 2), (7, 3), (10, 4), (20, 8), (40, 32), (80, 33), (90, 100)):
        assert torch.equal(linear(x[begin : begin + count]), together[begin : begin + count])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other(ops: CpuOps, name: str, number: float) -> None:
    linear, x = ops.pack(random_weight(64, 96, name), None), torch.randn(5, 96)
    before = linear(x)
    x[2, 70] = number
    after = linear(x)
    assert not after[2].isfinite().any()
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_rows_of_zeros_give_the_bias(ops: CpuOps) -> None:
    bias = torch.randn(33)
    assert torch.equal(ops.pack(random_weight(33, 64, "int8"), bias)(torch.zeros(2, 64)), bias.expand(2, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "threads"), EXPERTS, indirect=["threads"])
def test_experts_are_close_to_their_dequantised_weights(
    ops: CpuOps, threads: int, dtype: torch.dtype, bits: tuple[int | None, int | None]
) -> None:
    routing, hidden, width, count = Routing(3, normalize=True), 128, 96, 16

    def weight(n: int, k: int, bits: int | None) -> Weight:
        plain = (torch.randn(n, k) / k**0.5).to(dtype)
        return plain if bits is None else quantize(plain, bits)

    weights = [(weight(2 * width, hidden, bits[0]), weight(hidden, width, bits[1])) for _ in range(count)]
    kernels, reference = (back_end.pack_experts(iter(weights), count, routing) for back_end in (ops, TorchOps()))
    assert isinstance(kernels, PackedExperts)
    for tokens in (1, 5, 100):
        x, router_output = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, count).to(dtype)
        expected = reference(x, router_output).float()
        assert (kernels(x, router_output).float() - expected).norm() < 0.02 * expected.norm()
