"""The decoder of the Llama family (Llama 2 and 3, Mistral, Qwen2, Qwen3) over a paged KV pool.

The order of operations and of roundings is transformers', so that in float32 both choose the same tokens.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from engine.model.config import ModelConfig
from engine.model.rope import rope_table
from engine.model.weights import Checkpoint
from engine.ops.base import DeviceBatch, Layer, Linear, Ops, Stack


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """Runs a stack in single operations, for back ends that have nothing faster. See `engine.ops.base.FusedStack`."""

    ops: Ops
    stack: Stack

    def __call__(
        self,
        residual: torch.Tensor,
        batch: DeviceBatch,
        kv: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        num_rows: int,
    ) -> torch.Tensor | None:
        x = self.hidden(residual, batch, kv, rows, num_rows)
        return None if x is None else self.stack.head(x)

    def hidden(
        self,
        residual: torch.Tensor,
        batch: DeviceBatch,
        kv: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        num_rows: int,
    ) -> torch.Tensor | None:
        """As `__call__`, but what the head would be given: [R, H]."""
        ops, stack, eps = self.ops, self.stack, self.stack.eps
        x = ops.rms_norm(residual, stack.layers[0].input_norm, eps)
        last = len(stack.layers) - 1
        for index, layer in enumerate(stack.layers):
            q = ops.rope_store(layer.qkv(x), batch, stack.cos_sin, layer.q_norm, layer.k_norm, eps, kv[index])
            if index == last and num_rows == 0:
                return None
            x = ops.attention(q, kv[index], batch, stack.scale)  # [T, Hq · D]
            if index == last and rows is not None:  # nothing after this depends on the other tokens
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            x = ops.add_rms_norm(layer.o(x), residual, layer.post_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            next_norm = stack.norm if index == last else stack.layers[index + 1].input_norm
            x = ops.add_rms_norm(x, residual, next_norm, eps)
            stack.progress[0] += 1
        return x


class Decoder:
    """Weights on the device, and the forward pass over them. Letters as in `engine.ops.base`."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[float], None],
    ) -> None:
        """Reads the weights; memory peaks about one fused tensor above the final size.

        Args:
            config: Positions go up to its `max_model_len`.
            checkpoint: Checked against `expected_tensors(config)`.
            on_progress: Told the fraction that is loaded.
        """

        def read(*names: str) -> torch.Tensor:
            return checkpoint.read(names, dtype, device)

        def linear(prefix: str, names: Sequence[str], bias: bool) -> Linear:
            weights = read(*(f"{prefix}.{name}.weight" for name in names))
            return ops.pack(weights, read(*(f"{prefix}.{name}.bias" for name in names)) if bias else None)

        self._embedding = read("model.embed_tokens.weight")  # [V, H]
        layers: list[Layer] = []
        for index in range(config.num_layers):
            on_progress(index / config.num_layers)
            layer, attention, mlp = (f"model.layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
            layers.append(
                Layer(
                    input_norm=read(f"{layer}.input_layernorm.weight"),
                    qkv=linear(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
                    q_norm=read(f"{attention}.q_norm.weight") if config.qk_norm else None,
                    k_norm=read(f"{attention}.k_norm.weight") if config.qk_norm else None,
                    o=linear(attention, ("o_proj",), config.o_bias),
                    post_norm=read(f"{layer}.post_attention_layernorm.weight"),
                    gate_up=linear(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
                    down=linear(mlp, ("down_proj",), config.mlp_bias),
                )
            )
        norm = read("model.norm.weight")
        head = self._embedding if config.tie_embeddings else read("lm_head.weight")
        cos_sin = rope_table(config.rope, config.head_dim, config.max_model_len, device)
        self._ops = ops
        self._stack = Stack(layers, norm, ops.pack(head, None), cos_sin, config.norm_eps, config.head_dim**-0.5)
        self._run_layers = ops.fuse(self._stack) or LayerByLayer(ops, self._stack)
        on_progress(1.0)

    @property
    def progress(self) -> int:
        """Grows while steps are computed, with each layer where the host is what computes. Any thread may ask."""
        return int(self._stack.progress[0])

    def on(self, ops: Ops) -> Self:
        """The same weights with other ops of the same back end, so that both can run at the same time."""
        other = copy(self)
        other._ops = ops
        other._run_layers = ops.fuse(self._stack) or LayerByLayer(ops, self._stack)
        return other

    def beside(self) -> Self:
        """The same weights with workspaces of its own."""
        return self.on(self._ops.beside())

    def forward(
        self, batch: DeviceBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None, num_rows: int
    ) -> torch.Tensor | None:
        """Stores the batch's keys and values, and computes the logits of some of its tokens.

        Args:
            batch: The step.
            kv: For each layer [num_pages, 2, Hkv, BS, D].
            rows: The tokens wanted, int32 [R]; None: all of them.
            num_rows: R. With 0 only keys and values are computed.

        Returns:
            Logits [R, V] of the model's dtype; None if no row was wanted.
        """
        self.prepare(batch)
        residual = F.embedding(batch.token_ids, self._embedding)  # [T, H]
        return self._run_layers(residual, batch, kv, rows, num_rows)

    # The parts of `forward` for those who capture the middle one in a CUDA graph.

    def prepare(self, batch: DeviceBatch) -> None:
        """Plans a step."""
        self._ops.prepare(batch)

    def hidden(self, batch: DeviceBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stores keys and values of a prepared batch; what `head` makes logits of: [T, H]."""
        residual = F.embedding(batch.token_ids, self._embedding)
        layers = LayerByLayer(self._ops, self._stack)
        hidden = layers.hidden(residual, batch, kv, None, batch.num_tokens)
        assert hidden is not None
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits: [R, H] -> [R, V]"""
        return self._stack.head(hidden)
