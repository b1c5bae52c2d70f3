"""Weights of 8 or 4 bits in groups of 32 columns, each with a scale of its own.

    weight = scale · (value − zero)   or, with minima,   weight = scale · value − minimum

A value is unsigned, and the zero is 128 or 8. These are the blocks of GGUF's Q8_0, Q4_0 and, with minima, Q4_K.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GROUP, SCALE_BYTES = 32, 2
"""Columns with the same scale, and the size of a scale."""

_AT_ONCE = 1 << 22
"""Elements that are computed at once in float32, so that a large weight is not in memory several times."""


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Format of a quantised weight.

    Attributes:
        bits: Bits of an element: 8 or 4.
        has_minima: True if each group has a minimum, too.
    """

    bits: int
    has_minima: bool = False

    def num_bytes(self, elements: int) -> int:
        """Size of a weight with its scales and minima. `elements` are whole groups."""
        return elements * self.bits // 8 + elements // GROUP * SCALE_BYTES * (2 if self.has_minima else 1)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight of a linear layer.

    Attributes:
        bits: 8 or 4.
        values: One element a byte. uint8 [out, in]
        scales: float16 [out, in / GROUP]
        minima: The same; None if the format has none.
    """

    bits: int
    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """Returns the weight in float32: [out, in]"""
        groups = _in_groups(self.values.float())
        scales = self.scales.float()[..., None]
        if self.minima is None:
            return (scales * (groups - (1 << self.bits - 1))).flatten(1)
        return (scales * groups - self.minima.float()[..., None]).flatten(1)


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Joins weights of one format along their first dimension."""
    first = weights[0]
    return QuantizedWeight(
        first.bits,
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        None if first.minima is None else torch.cat([weight.minima for weight in weights if weight.minima is not None]),
    )


def quantize(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Quantises a weight [out, in], whose rows are whole groups, as GGUF does for Q8_0 or Q4_0.

    Raises:
        ValueError: It holds numbers that are not finite, or are too large.
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.float16)
    of_groups: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = _to_int8 if bits == 8 else _to_int4
    step = max(1, _AT_ONCE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        quantized, scale = of_groups(_in_groups(weight[part].float()))
        values[part], scales[part] = quantized.flatten(1), scale
    if not scales.isfinite().all():
        raise ValueError("it holds numbers that are not finite, or too large for a scale in float16")
    return QuantizedWeight(bits, values, scales)


def _in_groups(x: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out, groups, GROUP]"""
    return x.reshape(len(x), -1, GROUP)


def _to_int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, groups, GROUP] -> values of the same shape, and scales [out, groups]"""
    scale = groups.abs().amax(-1) / 127
    scaled = groups * _inverse(scale)
    rounded = torch.copysign((scaled.abs() + 0.5).floor(), scaled)  # ties away from zero
    return (rounded + 128).to(torch.uint8), scale


def _to_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number that is farthest from zero becomes -8, so that all 16 values are used."""
    farthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = farthest / -8
    return (groups.double() * _inverse(scale) + 8.5).clamp(0, 15).to(torch.uint8), scale


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)[..., None]
