"""Table of rotary position embedding (https://arxiv.org/abs/2104.09864) and its scaling variants."""

import math

import torch

from engine.model.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> torch.Tensor:
    """Computes cosines and sines of every position: float32 [length, head_dim], cosines in the first half.

    The order of operations is that of transformers, so that each number has the same bits.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)  # [length, D / 2]
    table = torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    return table.to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Computes radians per position for each pair of dimensions: float32 [head_dim / 2]."""
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Interpolates long wavelengths, leaves short ones, blends those between (Llama 3.1)."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    interpolated = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * interpolated / rope.factor + smooth * interpolated
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, interpolated)


def _yarn(rope: RopeConfig, wavelengths: torch.Tensor) -> torch.Tensor:
    """NTK by parts (https://arxiv.org/abs/2309.00071, section 3.2)."""
    dim = 2 * len(wavelengths)

    def dimension(rotations: float) -> float:
        """Dimension whose frequency makes this many rotations over the original context."""
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as in transformers
    unscaled = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - unscaled) + 1.0 / wavelengths * unscaled
