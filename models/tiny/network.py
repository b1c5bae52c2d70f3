"""The network for training: Qwen3 in float32, with parameters under their Hugging Face names (without `model.`).

It computes the same as `engine.model.decoder`, but without a cache, and with logits only where requested.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network, named as in config.json. The defaults are the bundled model's."""

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
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden]."""
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
        """Maps `hidden` [B, T, hidden] to the same shape."""
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
        """Maps `hidden` [B, T, hidden] to the same shape; `cos` and `sin` are [T, head_dim]."""
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
    """Root-mean-square norm in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [..., size] to the same shape."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Mlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `hidden` [B, T, hidden] to the same shape."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


def frequencies(shape: Shape) -> Tensor:
    """Rotation per position of each of the head_dim / 2 pairs of dimensions, in radians."""
    return shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine [positions, head_dim] of every position; dimensions i and i + head_dim / 2 form a pair."""
    angles = torch.outer(torch.arange(shape.max_position_embeddings, dtype=torch.float64), frequencies(shape))
    return torch.cat([angles.cos()] * 2, -1).float(), torch.cat([angles.sin()] * 2, -1).float()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `heads` [B, H, T, head_dim]."""
    first, second = heads.chunk(2, -1)
    return heads * cos.to(heads.dtype) + torch.cat([-second, first], -1) * sin.to(heads.dtype)
