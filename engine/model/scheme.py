"""How the library compressed-tensors says that a checkpoint's weights are quantised.

https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

READABLE = "compressed-tensors (symmetric int8, int4 and fp8), and GGUF files (Q8_0, Q4_0, Q4_K_M)"
"""Quantised weights that can be served, in error messages."""

_STORED: Mapping[str, Sequence[str]] = {
    "int8": ("int-quantized", "naive-quantized", "pack-quantized"),
    "int4": ("pack-quantized",),
    "float8": ("float-quantized", "naive-quantized"),
}
"""The formats in which weights of each type can be read."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a checkpoint are stored.

    Attributes:
        kind: Integers of 8 or 4 bits, or float8_e4m3fn.
        packed: True if several integers share a word.
        group: Columns with the same scale; 0 for whole rows or the whole weight.
    """

    kind: Literal["int", "float"]
    bits: int
    packed: bool
    group: int


def read_scheme(fields: dict[str, Any]) -> Scheme:
    """Reads `quantization_config` of config.json.

    Raises:
        ValueError: The scheme can't be read; the message says what it is.
    """
    sparsity = fields.get("sparsity_config")
    packing = sparsity.get("format") if isinstance(sparsity, dict) else None
    if packing not in (None, "dense"):
        raise ValueError(f"its weights are stored without their zeros, as {packing}")
    groups = fields.get("config_groups")
    described = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in described]
    first = weights[0] if weights else None
    if not isinstance(first, dict):
        raise ValueError("its config_groups name no weights")
    if any(each != first for each in weights):
        raise ValueError("its config_groups differ in their weights")
    if fields.get("transform_config"):
        raise ValueError("its weights are rotated, and so activations must be")
    kind, bits, strategy = first.get("type"), first.get("num_bits"), first.get("strategy")
    name = f"{kind}{bits}"
    if name not in _STORED:
        raise ValueError(f"its weights are {name}")
    if first.get("symmetric") is not True or first.get("actorder") not in (None, "static", "weight"):
        raise ValueError(f"its {name} weights have zero points or reordered columns")
    if strategy not in ("tensor", "channel", "group"):
        raise ValueError(f"the strategy of its {name} weights is {strategy}")
    group = first.get("group_size") if strategy == "group" else 0
    if not isinstance(group, int) or group < 0 or (strategy == "group" and not group):
        raise ValueError(f"the group_size of its {name} weights is {group}")
    stored = fields.get("format")
    if stored not in _STORED[name] or (kind == "float" and group):
        raise ValueError(f"its {name} weights are stored as {stored} with strategy {strategy}")
    return Scheme("int" if kind == "int" else "float", 4 if name == "int4" else 8, stored == "pack-quantized", group)
