"""How the library compressed-tensors says that a checkpoint's weights are quantised.

https://github.com/vllm-project/compressed-tensors
"""

from dataclasses import dataclass
from typing import Any, Literal

READABLE = "compressed-tensors (symmetric int8, int4 and fp8), and GGUF files (Q8_0, Q4_0, Q4_K_M)"
"""Quantised weights that can be served, in error messages."""


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
    groups = fields.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not weights or not all(isinstance(each, dict) for each in weights):
        raise ValueError("its config_groups name no weights")
    first = weights[0]
    if any(each != first for each in weights):
        raise ValueError("its config_groups differ in their weights")
    kind, bits, strategy = first.get("type"), first.get("num_bits"), first.get("strategy")
    name = f"{kind}{bits}"
    if (kind, bits) not in (("int", 8), ("int", 4), ("float", 8)):
        raise ValueError(f"its weights are {name}")
    if first.get("symmetric") is not True or first.get("actorder") is not None:
        raise ValueError(f"its {name} weights have zero points or reordered columns")
    if strategy not in ("tensor", "channel", "group"):
        raise ValueError(f"the strategy of its {name} weights is {strategy}")
    group = first.get("group_size") if strategy == "group" else 0
    if not isinstance(group, int) or group < 0 or (strategy == "group" and not group):
        raise ValueError(f"the group_size of its {name} weights is {group}")
    packed = fields.get("format") == "pack-quantized"
    if (kind == "int" and bits == 4 and not packed) or (kind == "float" and (packed or group)):
        raise ValueError(f"its {name} weights are stored as {fields.get('format')} with strategy {strategy}")
    return Scheme(kind, bits, packed, group)
