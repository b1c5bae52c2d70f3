"""A decoder's parameters, as one table: checking, loading and memory planning are derived from it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.model.config import ModelConfig, Quantization

_EXPERT = "{expert}"
"""Stands for an expert's index in the names of its tensors."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder, joined from one or more tensors of the checkpoint.

    Attributes:
        name: Field of `engine.ops.base.Layer` or `Stack`; `embedding`; or `expert_gate_up` or `expert_down`, of which
            a layer's `experts` are made.
        parts: Rows of each tensor, by its name in the checkpoint without `.weight`; in layers, without the layer's
            prefix too. Order of joining.
        columns: Columns of the weight; None for a vector.
        bias: True if each part has a bias.
        layers: Layers that have this parameter; None if it is outside the layers.
        experts: Number of experts, if each of them has this parameter; else 0.
    """

    name: str
    parts: Mapping[str, int]
    columns: int | None = None
    bias: bool = False
    layers: Collection[int] | None = None
    experts: int = 0

    def tensors(self, kind: str, layer: int | None = None, expert: int = 0) -> list[str]:
        """Checkpoint names of the parts.

        Args:
            kind: weight or bias.
            layer: Index of the layer; None for a parameter outside the layers.
            expert: Index of the expert, for a parameter of experts.
        """
        prefix = "" if layer is None else f"model.layers.{layer}."
        return [f"{prefix}{part.replace(_EXPERT, str(expert))}.{kind}" for part in self.parts]

    @property
    def can_be_quantized(self) -> bool:
        """True for linear layers, but not for the router, whose few weights decide which experts compute."""
        return self.columns is not None and self.name not in ("embedding", "router")

    def bits(self, quantization: Quantization) -> int | None:
        """Bits of the weight's elements if it is quantised at start; None if it is not.

        The head has 8 bits at least: it is the last layer, so that no other evens out its errors.
        """
        if quantization == "none" or not self.can_be_quantized:
            return None
        return 8 if quantization == "int8" or self.name == "head" else 4


def parameters(config: ModelConfig) -> list[Parameter]:
    """All parameters of a model."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    every = range(config.num_layers)
    qk_norms = [
        Parameter(f"{part}_norm", {f"self_attn.{part}_norm": dim}, layers=every)
        for part in ("q", "k")
        if config.qk_norm
    ]
    return [
        Parameter("embedding", {"model.embed_tokens": config.vocab_size}, hidden),
        Parameter("input_norm", {"input_layernorm": hidden}, layers=every),
        Parameter("qkv", qkv, hidden, config.qkv_bias, every),
        *qk_norms,
        Parameter("o", {"self_attn.o_proj": hidden}, queries, config.o_bias, every),
        Parameter("post_norm", {"post_attention_layernorm": hidden}, layers=every),
        *_mlp(config),
        *_experts(config),
        Parameter("norm", {"model.norm": hidden}),
        *([] if config.tie_embeddings else [head_of(config)]),
    ]


def head_of(config: ModelConfig) -> Parameter:
    """The LM head, whose weight may be the embedding's."""
    name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return Parameter("head", {name: config.vocab_size}, config.hidden_size)


def _mlp(config: ModelConfig) -> list[Parameter]:
    hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    layers = sorted(set(range(config.num_layers)).difference(config.experts.layers if config.experts else ()))
    if not layers:
        return []
    return [
        Parameter("gate_up", {"mlp.gate_proj": width, "mlp.up_proj": width}, hidden, bias, layers),
        Parameter("down", {"mlp.down_proj": hidden}, width, bias, layers),
    ]


def _experts(config: ModelConfig) -> list[Parameter]:
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        return []
    is_mixtral = config.family == "mixtral"
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    expert = f"{block}.experts.{_EXPERT}"
    both = {f"{expert}.{gate}": experts.width, f"{expert}.{up}": experts.width}
    return [
        Parameter("router", {f"{block}.gate": experts.count}, hidden, layers=experts.layers),
        Parameter("expert_gate_up", both, hidden, layers=experts.layers, experts=experts.count),
        Parameter("expert_down", {f"{expert}.{down}": hidden}, experts.width, False, experts.layers, experts.count),
    ]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in parameters(config):
        kinds = {"weight": () if parameter.columns is None else (parameter.columns,)}
        if parameter.bias:
            kinds["bias"] = ()
        for layer in [None] if parameter.layers is None else parameter.layers:
            for expert in range(parameter.experts or 1):
                for kind, columns in kinds.items():
                    names = parameter.tensors(kind, layer, expert)
                    for name, rows in zip(names, parameter.parts.values(), strict=True):
                        shapes[name] = (rows, *columns)
    return shapes
