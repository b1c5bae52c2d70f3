"""The network in training: Qwen3 in float32, with parameters under their Hugging Face names (less the `model.` prefix).

Serving computes the same in `engine.model.decoder`; here there is no cache, and the vocabulary is scored only where
asked.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are the bundled model's."""

    vocab_size: int
    hidden_size: int = 320
    intermediate_size: int = 448
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e8
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


class Network(nn.Module):
    """A Qwen3 decoder with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states [B, T, hidden] of `tokens` [B, T]."""
        hidden = self.embed_tokens(tokens)
        cos, sin = (self.get_buffer(name)[: tokens.shape[1]] for name in ("cos", "sin"))
        for layer in self.decoder():
            hidden = layer(hidden, cos, sin)
        result: Tensor = self.norm(hidden)
        return result

    def decoder(self) -> list["Layer"]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary [N, vocab] of final hidden states [N, hidden]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights in bfloat16 under their names in a Hugging Face checkpoint."""
        return {f"model.{name}": value.detach().to(torch.bfloat16) for name, value in self.state_dict().items()}


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, hidden] to the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Attention(nn.Module):
    """Causal attention with grouped queries, QK-norm and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RmsNorm(self.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, eps=shape.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, hidden] to the same; `cos` and `sin` are [T, head_dim]."""
        batch, length, _ = hidden.shape
        query = self.q_norm(self.q_proj(hidden).view(batch, length, self.heads, -1)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).view(batch, length, self.kv_heads, -1)).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        groups = self.heads // self.kv_heads
        key = rotate(key, cos, sin).repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin), key, value.repeat_interleave(groups, 1), is_causal=True
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class RmsNorm(nn.RMSNorm):
    """Root-mean-square norm, in the precision of what it norms."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, hidden] to the same."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


def frequencies(shape: Shape) -> Tensor:
    """The angle by which each of the head_dim / 2 pairs of dimensions turns a position, in radians."""
    return shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine [positions, head_dim] of every position's angles; dimension i turns with i + head_dim / 2."""
    angles = torch.outer(torch.arange(shape.max_position_embeddings, dtype=torch.float64), frequencies(shape))
    return torch.cat([angles.cos()] * 2, -1).float(), torch.cat([angles.sin()] * 2, -1).float()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `heads` [B, H, T, head_dim]."""
    first, second = heads.chunk(2, -1)
    return heads * cos.to(heads.dtype) + torch.cat([-second, first], -1) * sin.to(heads.dtype)


def config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """config.json of a checkpoint of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
