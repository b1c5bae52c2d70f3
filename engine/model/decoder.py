"""The decoder of the Llama family (Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3) over a paged KV pool.

The order of operations and of roundings is transformers', so that in float32 both choose the same tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from cpd.common.errors import CheckpointError
from engine.model.config import ExpertsConfig, ModelConfig, Quantization
from engine.model.parameters import Parameter, head_of, parameters
from engine.model.rope import rope_table
from engine.model.weights import Checkpoint
from engine.ops.base import DeviceBatch, Experts, Layer, Linear, Ops, Routing, Stack, Weight
from engine.ops.quantized import QuantizedWeight, quantize


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """Runs a stack one operation at a time, for back ends without a `FusedStack` (`engine.ops.base`)."""

    ops: Ops
    stack: Stack

    def __call__(
        self, residual: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        x = self.hidden(residual, batch, kv, rows)
        return None if x is None else self.stack.head(x)

    def hidden(
        self, residual: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Does what `__call__` does up to the head: returns its input, [R, H]."""
        q = self.first_queries(residual, batch, kv)
        for index in range(len(self.stack.layers) - 1):
            x = self.attention(index, q, batch, kv)
            q = self.next_queries(index, x, residual, batch, kv)
        return self.last_hidden(q, residual, batch, kv, rows)

    # The parts of `hidden`. The attention is computed between them.

    def first_queries(self, residual: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """From the embeddings to the queries of the first layer: [T, H] -> [T, Hq, D]"""
        return self._queries(0, self.ops.rms_norm(residual, self.stack.layers[0].input_norm, self.stack.eps), batch, kv)

    def attention(self, index: int, q: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """The attention of a layer: [T, Hq, D] -> [T, Hq · D]"""
        return self.ops.attention(q, kv[index], batch, self.stack.scale, self.stack.layers[index].window)

    def next_queries(
        self, index: int, x: torch.Tensor, residual: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """From the attention of a layer, but the last, to the queries of the next: [T, Hq · D] -> [T, Hq, D]"""
        return self._queries(index + 1, self._after_attention(index, x, residual), batch, kv)

    def last_hidden(
        self,
        q: torch.Tensor,
        residual: torch.Tensor,
        batch: DeviceBatch,
        kv: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """From the queries of the last layer to the head's input, [R, H]."""
        last = len(self.stack.layers) - 1
        if rows is not None and not len(rows):
            return None
        x = self.attention(last, q, batch, kv)
        if rows is not None:  # from here on nothing depends on the other tokens
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        return self._after_attention(last, x, residual)

    def _queries(self, index: int, x: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        layer, stack = self.stack.layers[index], self.stack
        return self.ops.rope_store(layer.qkv(x), batch, stack.cos_sin, layer.q_norm, layer.k_norm, stack.eps, kv[index])

    def _after_attention(self, index: int, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        ops, stack, layer = self.ops, self.stack, self.stack.layers[index]
        x = ops.add_rms_norm(layer.o(x), residual, layer.post_norm, stack.eps)
        if layer.experts is not None and layer.router is not None:
            x = layer.experts(x, layer.router(x))
        else:
            assert layer.gate_up is not None, "a layer has an MLP or experts"
            assert layer.down is not None
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
        norm = stack.norm if index + 1 == len(stack.layers) else stack.layers[index + 1].input_norm
        stack.progress[0] += 1
        return ops.add_rms_norm(x, residual, norm, stack.eps)


Part = torch.Tensor | Linear | Experts
"""A vector or table of a decoder, a linear layer, or a layer's experts."""

P = TypeVar("P", bound=Part)


class Decoder:
    """Weights on the device, and the forward pass. Shapes use the letters of `engine.ops.base`."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[float], None],
        quantization: Quantization = "none",
    ) -> None:
        """Reads the weights. Peak memory is the final size plus about one fused tensor, or one expert's.

        Args:
            config: Its `max_model_len` bounds the positions.
            checkpoint: Already checked against `expected_tensors(config)`.
            dtype: Type of activations, and of weights that are not quantised.
            on_progress: Called with the fraction that is loaded.

        Raises:
            CheckpointError: A weight cannot be quantised.
        """

        table = {parameter.name: parameter for parameter in parameters(config)}
        parts: list[tuple[Part, Callable[[Checkpoint], Part]]] = []

        def tensor(parameter: Parameter, layer: int | None = None) -> Callable[[Checkpoint], torch.Tensor]:
            return lambda source: source.read(parameter.tensors("weight", layer), dtype, device)

        def weight(source: Checkpoint, parameter: Parameter, layer: int | None = None, expert: int = 0) -> Weight:
            names, bits = parameter.tensors("weight", layer, expert), parameter.bits(quantization)
            if not parameter.can_be_quantized:
                return source.read(names, dtype, device)
            try:
                found = source.read_weight(names, dtype, device)
                return found if bits is None or isinstance(found, QuantizedWeight) else quantize(found, bits)
            except ValueError as error:
                raise CheckpointError(f"{names[0]} cannot be quantised: {error}") from None

        def linear(parameter: Parameter, layer: int | None = None) -> Callable[[Checkpoint], Linear]:
            def read(source: Checkpoint) -> Linear:
                bias = source.read(parameter.tensors("bias", layer), dtype, device) if parameter.bias else None
                return ops.pack(weight(source, parameter, layer), bias)

            return read

        def experts(settings: ExpertsConfig, layer: int) -> Callable[[Checkpoint], Experts]:
            def weights(source: Checkpoint) -> Iterator[tuple[Weight, Weight]]:
                for expert in range(settings.count):
                    gate_up, down = (
                        weight(source, table[name], layer, expert) for name in ("expert_gate_up", "expert_down")
                    )
                    yield gate_up, down

            routing = Routing(settings.per_token, settings.normalize)
            return lambda source: ops.pack_experts(weights(source), settings.count, routing)

        def load(read: Callable[[Checkpoint], P]) -> P:
            part = read(checkpoint)
            parts.append((part, read))
            return part

        def in_layer(parameter: Parameter, layer: int) -> Any:  # a vector, or a linear layer
            return load(tensor(parameter, layer) if parameter.columns is None else linear(parameter, layer))

        self._embedding = load(tensor(table["embedding"]))  # [V, H]
        layers: list[Layer] = []
        for index in range(config.num_layers):
            on_progress(index / config.num_layers)
            fields = {
                name: in_layer(row, index)
                for name, row in table.items()
                if row.layers is not None and index in row.layers and not row.experts
            }
            if config.experts is not None and index in config.experts.layers:
                fields["experts"] = load(experts(config.experts, index))
            layers.append(Layer(**fields, window=config.windows[index]))
        norm = load(tensor(table["norm"]))
        head_row = head_of(config)
        if (
            config.tie_embeddings
            and quantization == "none"
            and checkpoint.group_format(head_row.tensors("weight")) is None
        ):
            head = ops.pack(self._embedding, None)
            parts.append((head, linear(head_row)))
        else:
            head = load(linear(head_row))
        cos_sin = load(lambda _: rope_table(config.rope, config.head_dim, config.max_model_len, device))
        self._parts = parts
        self._ops = ops
        self._stack = Stack(layers, norm, head, cos_sin, config.norm_eps, config.head_dim**-0.5)
        self._run_layers = ops.fuse(self._stack) or LayerByLayer(ops, self._stack)
        on_progress(1.0)

    @property
    def progress(self) -> int:
        """Number that grows while steps are computed, on a CPU with each layer. Thread-safe."""
        return int(self._stack.progress[0])

    @property
    def expert_bytes(self) -> int:
        """Bytes of experts' weights read so far, on a CPU. Thread-safe."""
        return int(self._stack.expert_bytes[0])

    def weights(self) -> list[torch.Tensor]:
        """Returns all tensors that steps read."""
        return [tensor for part, _ in self._parts for tensor in _tensors(part)]

    def read_again(self, checkpoint: Checkpoint) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each of `weights` with a new tensor that the same checkpoint gives for it now."""
        for part, read in self._parts:
            with torch.inference_mode():
                fresh = _tensors(read(checkpoint))
            yield from zip(_tensors(part), fresh, strict=True)

    def with_ops(self, ops: Ops) -> Self:
        """Returns a decoder with the same weights and other ops of the same back end; both can run concurrently."""
        other = copy(self)
        other._ops = ops
        other._run_layers = ops.fuse(self._stack) or LayerByLayer(ops, self._stack)
        return other

    def with_own_workspaces(self) -> Self:
        """Returns a decoder with the same weights and workspaces of its own; both can run concurrently."""
        return self.with_ops(self._ops.with_own_workspaces())

    def forward(self, batch: DeviceBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None) -> torch.Tensor | None:
        """Stores the batch's keys and values, and computes logits of some of its tokens.

        Args:
            batch: The step.
            kv: Each layer's [num_pages, 2, Hkv, BS, D].
            rows: Tokens whose logits to compute, int32 [R], ascending; None for all. If it is empty, only keys and
                values are computed.

        Returns:
            Logits [R, V] in the model's dtype; None if R is 0.
        """
        self.prepare(batch)
        return self._run_layers(self.embed(batch.token_ids), batch, kv, rows)

    # The parts of `forward`: CUDA graphs capture some of them.

    def prepare(self, batch: DeviceBatch) -> None:
        """Plans a step."""
        self._ops.prepare(batch)

    def hidden(self, batch: DeviceBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stores keys and values of a prepared batch, and returns the input of `head`: [T, H]."""
        hidden = self.layer_by_layer().hidden(self.embed(batch.token_ids), batch, kv, None)
        assert hidden is not None
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Looks up embeddings: [T] -> [T, H]"""
        return self._embedding.index_select(0, token_ids)

    def layer_by_layer(self) -> LayerByLayer:
        """Returns the layers' operations with this decoder's ops."""
        return LayerByLayer(self._ops, self._stack)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes logits: [R, H] -> [R, V]"""
        return self._stack.head(hidden)


def _tensors(part: Part) -> list[torch.Tensor]:
    return [part] if isinstance(part, torch.Tensor) else part.tensors()
