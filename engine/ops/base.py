"""What a device must provide for the forward pass: one protocol, one file a back end.

Letters in shape comments: T tokens of the step, S sequences, H hidden size, Hq query heads, Hkv key-value heads,
D head size, I width of the MLP, R sampled rows, V vocabulary, BS block size (`cpd.common.blocks.BLOCK_SIZE`).

Layer views of the KV pool are `pool[:, layer]`: [num_pages, 2, Hkv, BS, D], strided over pages and contiguous within
one page. Index 0 of the second dimension is keys, 1 is values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.ops.buffers import pack

Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [T, in] -> x @ weight.T + bias, [T, out]."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A `Batch` on the device. All tensors are int32 and contiguous.

    Attributes:
        token_ids: [T]
        positions: Absolute positions. [T]
        slots: Where each token's key and value go: `page * BS + offset`. [T]
        query_start: Sequence s owns tokens `query_start[s]:query_start[s + 1]`. [S + 1]
        context_lens: Tokens that sequence s's last query attends to, itself included. [S]
        block_tables: Pages of each sequence in block order, padded beyond its context; in host memory, since most
            back ends want them in another form. [S, >= blocks of the longest]
        num_tokens: T
        num_seqs: S
        num_decodes: How many leading sequences have one query token.
        max_query_len: Most query tokens of one sequence.
        max_context_len: Largest of `context_lens`.
        host: The same in host memory, so that nobody has to read the device back.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_context_len: int
    host: Batch

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        """The batch on a device; on a CPU it shares the batch's memory, which must not change meanwhile."""
        arrays = (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_lens)
        return cls.over(batch, pack(arrays, device))

    @classmethod
    def over(cls, batch: Batch, tensors: Sequence[torch.Tensor]) -> Self:
        """The batch, of which `tensors` hold token ids, positions, slots, query starts and context lengths."""
        token_ids, positions, slots, query_start, context_lens = tensors
        return cls(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=torch.from_numpy(np.ascontiguousarray(batch.block_tables, np.int32)),
            num_tokens=len(batch.token_ids),
            num_seqs=len(batch.context_lens),
            num_decodes=batch.num_decodes,
            max_query_len=int(np.diff(batch.query_start).max()),
            max_context_len=int(batch.context_lens.max()),
            host=batch,
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of a model's attention."""

    num_q: int
    num_kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a decoder."""

    input_norm: torch.Tensor  # [H]
    qkv: Linear  # H -> (Hq + 2 Hkv) · D
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: Linear  # Hq · D -> H
    post_norm: torch.Tensor  # [H]
    gate_up: Linear  # H -> 2I
    down: Linear  # I -> H


@dataclass(frozen=True, slots=True)
class Stack:
    """All layers of a decoder, the norm after them and the head.

    Attributes:
        cos_sin: See `Ops.rope_store`.
        eps: Of all norms.
        scale: Of the attention scores.
        progress: Counts the layers that steps went through, for whoever wonders whether a long one goes on. int64 [1]
    """

    layers: Sequence[Layer]
    norm: torch.Tensor  # [H]
    head: Linear  # H -> V
    cos_sin: torch.Tensor
    eps: float
    scale: float
    progress: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))


class FusedStack(Protocol):
    """A prepared step through all layers."""

    def __call__(
        self,
        residual: torch.Tensor,
        batch: DeviceBatch,
        kv: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        num_rows: int,
    ) -> torch.Tensor | None:
        """Stores the batch's keys and values, and computes the logits of some of its tokens.

        Args:
            residual: Embeddings [T, H], scratch.
            batch: The step, prepared.
            kv: For each layer [num_pages, 2, Hkv, BS, D].
            rows: The tokens wanted, int32 [R], ascending; None: all of them.
            num_rows: R. With 0 only keys and values are computed.

        Returns:
            [R, V]; None if R is 0.
        """


class Ops(Protocol):
    """The device-specific pieces of a decoder's forward pass.

    Activations are contiguous and of the model's dtype; norms, RoPE and softmax compute in float32 and round once.
    Inputs marked *scratch* may be overwritten, and the result may be a view of them. Called under
    `torch.inference_mode()`, by one thread, one step at a time.

    Attributes:
        kernels: Whose they are, for people.
    """

    kernels: ClassVar[str]

    def beside(self) -> Self:
        """Ops for steps that run at the same time: what they share, no step changes."""

    def prepare(self, batch: DeviceBatch) -> None:
        """Plans a step, once for all layers. Before the first `rope_store` and `attention` of a batch."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Makes a linear layer of weight [out, in] and bias [out]. May repack: the caller drops its own references."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight: [T, H] -> new [T, H]. `x` is kept."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`residual += x` in place (rounded to the model's dtype), and returns the norm of the sum.

        Args:
            x: [T, H], scratch.
            residual: [T, H], updated.
        """

    def rope_store(
        self,
        qkv: torch.Tensor,
        batch: DeviceBatch,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        """Optional per-head norm of queries and keys, then RoPE; stores keys and values into the pages.

        Args:
            qkv: [T, (Hq + 2 Hkv) · D], scratch: all query heads, all key heads, all value heads.
            batch: Gives `positions` and `slots`.
            cos_sin: float32 [max_model_len, D]: D/2 cosines, then D/2 sines. Dimension i turns with i + D/2.
            q_norm, k_norm: RMSNorm weights [D], both or neither.
            eps: Of that norm.
            kv: [num_pages, 2, Hkv, BS, D], written at `batch.slots`.

        Returns:
            Queries [T, Hq, D].
        """

    def attention(self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float) -> torch.Tensor:
        """Causal attention over the paged context, all of a layer's keys and values being stored.

        Query i of sequence s stands at position `context_lens[s] - query_len[s] + i` and attends to that and every
        earlier position of its own sequence. Query head h uses key-value head `h // (Hq // Hkv)`.

        Args:
            q: [T, Hq, D], scratch.
            kv: [num_pages, 2, Hkv, BS, D]

        Returns:
            [T, Hq · D]
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up: [T, 2I], scratch, gate first -> [T, I]"""

    def fuse(self, stack: Stack) -> FusedStack | None:
        """A faster way through all layers than one operation after the other; None: this back end has none."""
