"""A decoder's parameters, as one table: checking, loading and memory planning are derived from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder, joined from one or more tensors of the checkpoint.

    Attributes:
        name: Field of `engine.ops.base.Layer` or `Stack`, or `embedding`.
        parts: Rows of each tensor, by its name in the checkpoint without `.weight`; in layers, without the layer's
            prefix too. Order of joining.
        columns: Columns of the weight; None for a vector.
        bias: True if each part has a bias.
        per_layer: True if every layer has this parameter.
    """

    name: str
    parts: Mapping[str, int]
    columns: int | None = None
    bias: bool = False
    per_layer: bool = True

    def tensors(self, kind: str, layer: int | None = None) -> list[str]:
        """Checkpoint names of the parts.

        Args:
            kind: weight or bias.
            layer: Index of the layer; None for a parameter outside the layers.
        """
        prefix = "" if layer is None else f"model.layers.{layer}."
        return [f"{prefix}{part}.{kind}" for part in self.parts]


def parameters(config: ModelConfig) -> list[Parameter]:
    """All parameters of a model."""
    hidden, width, dim, vocab = config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    qk_norms = [Parameter("q_norm", {"self_attn.q_norm": dim}), Parameter("k_norm", {"self_attn.k_norm": dim})]
    head = Parameter("head", {"lm_head": vocab}, hidden, per_layer=False)
    return [
        Parameter("embedding", {"model.embed_tokens": vocab}, hidden, per_layer=False),
        Parameter("input_norm", {"input_layernorm": hidden}),
        Parameter("qkv", qkv, hidden, config.qkv_bias),
        *(qk_norms if config.qk_norm else []),
        Parameter("o", {"self_attn.o_proj": hidden}, queries, config.o_bias),
        Parameter("post_norm", {"post_attention_layernorm": hidden}),
        Parameter("gate_up", {"mlp.gate_proj": width, "mlp.up_proj": width}, hidden, config.mlp_bias),
        Parameter("down", {"mlp.down_proj": hidden}, width, config.mlp_bias),
        Parameter("norm", {"model.norm": hidden}, per_layer=False),
        *([] if config.tie_embeddings else [head]),
    ]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the checkpoint must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in parameters(config):
        kinds = {"weight": () if parameter.columns is None else (parameter.columns,)}
        if parameter.bias:
            kinds["bias"] = ()
        for layer in range(config.num_layers) if parameter.per_layer else [None]:
            for kind, columns in kinds.items():
                for name, rows in zip(parameter.tensors(kind, layer), parameter.parts.values(), strict=True):
                    shapes[name] = (rows, *columns)
    return shapes
