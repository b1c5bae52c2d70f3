"""The protocol that a device's back end implements for the forward pass; each back end has a file of its own.

`make_ops` in `engine/ops/__init__.py` chooses one.

Letters in shapes: T tokens of the step, S sequences, H hidden size, Hq query heads, Hkv key-value heads, D head size,
I width of an MLP, E experts of a layer, R sampled rows, V vocabulary, BS block size (`cpd.common.blocks.BLOCK_SIZE`).

A layer's view of the KV pool is `pool[:, layer]`: [num_pages, 2, Hkv, BS, D], strided over pages and contiguous within
a page. The second dimension holds keys, then values. In int8, which only `cpu_ops.py` computes, the view has bytes:
[num_pages, 2, Hkv, BS · (D + 4)], for each head its numbers [BS, D] and then the scale of each token in float32.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.ops.buffers import upload_arrays
from engine.ops.draw import Draws
from engine.ops.quantized import QuantizedWeight

Weight = torch.Tensor | QuantizedWeight


class Linear(Protocol):
    """A packed linear layer."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors that it reads."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x @ weight.T + bias: [T, in] -> [T, out]"""


class Experts(Protocol):
    """A layer's packed experts."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors that they read."""

    def __call__(self, x: torch.Tensor, router_output: torch.Tensor) -> torch.Tensor:
        """Computes the weighted sum of what a token's experts make of it: [T, H], router's output [T, E] -> [T, H]"""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A `Batch` on the device. All tensors are int32 and contiguous.

    Attributes:
        token_ids: [T]
        positions: Position in its sequence of each token. [T]
        slots: Destination of each token's key and value: `page * BS + offset`. [T]
        query_start: Sequence s owns tokens `query_start[s]:query_start[s + 1]`. [S + 1]
        context_lens: Tokens that the last query of sequence s attends to, including itself. [S]
        block_tables: Pages of each sequence in block order, padded beyond its context. They stay in host memory, since
            most back ends need another form of them. [S, >= blocks of the longest]
        num_tokens: T
        num_seqs: S
        num_decodes: Number of leading sequences with one query token.
        host: The batch in host memory, which can be read without waiting for the device.
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
    host: Batch

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        """Copies a batch to a device. On a CPU the result shares the batch's memory, which must not change."""
        arrays = (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_lens)
        return cls.over(batch, upload_arrays(arrays, device))

    @classmethod
    def over(cls, batch: Batch, tensors: Sequence[torch.Tensor]) -> Self:
        """Makes the batch from tensors of token ids, positions, slots, query starts and context lengths."""
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
            host=batch,
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of a model's attention.

    Attributes:
        windows: True if a layer has a sliding window.
    """

    num_q: int
    num_kv: int
    dim: int
    windows: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's output becomes weights of experts.

    A token is computed by the `per_token` experts with the largest probabilities, of equal ones by the first. The
    probabilities are the softmax of the router's output.

    Attributes:
        normalize: True if the weights of a token's experts are divided by their sum.
    """

    per_token: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a decoder. `engine.model.parameters` has the same names.

    A layer has an MLP, which is `gate_up` and `down`, or `router` and `experts`.

    Attributes:
        window: The last tokens, itself included, that a token attends to; None for all.
    """

    input_norm: torch.Tensor  # [H]
    qkv: Linear  # H -> (Hq + 2 Hkv) · D
    o: Linear  # Hq · D -> H
    post_norm: torch.Tensor  # [H]
    gate_up: Linear | None = None  # H -> 2I
    down: Linear | None = None  # I -> H
    router: Linear | None = None  # H -> E
    experts: Experts | None = None  # H, E -> H
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """All layers of a decoder, the final norm and the head.

    Attributes:
        cos_sin: See `Ops.rope_store`.
        eps: Epsilon of all norms.
        scale: Factor of the attention scores.
        progress: Counter of computed layers, which shows that a long step is not stuck. int64 [1]
        expert_bytes: Counter of the bytes of experts' weights that a `FusedStack` has read. int64 [1]
    """

    layers: Sequence[Layer]
    norm: torch.Tensor  # [H]
    head: Linear  # H -> V
    cos_sin: torch.Tensor
    eps: float
    scale: float
    progress: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    expert_bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class FixedBuffers:
    """Where ops of `Ops.with_fixed_buffers` put a step's results, at the beginning of each buffer.

    Attributes:
        queries: Result of `rope_store`. [most tokens, Hq, D]
        attended: Result of `attention`. [most tokens, Hq · D]
    """

    queries: torch.Tensor
    attended: torch.Tensor


class FusedStack(Protocol):
    """Runs a prepared step through all layers."""

    def __call__(
        self, residual: torch.Tensor, batch: DeviceBatch, kv: Sequence[torch.Tensor], rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Stores the batch's keys and values, and computes logits of some of its tokens.

        Args:
            residual: Embeddings [T, H], scratch.
            batch: The prepared step.
            kv: Each layer's [num_pages, 2, Hkv, BS, D].
            rows: Tokens whose logits to compute, int32 [R], ascending; None for all. If it is empty, only keys and
                values are computed.

        Returns:
            [R, V]; None if R is 0.
        """


class Ops(Protocol):
    """The device-specific operations of a decoder's forward pass.

    Activations are contiguous and of the model's dtype. Norms, RoPE and softmax compute in float32 and round once.
    Inputs marked *scratch* may be overwritten, and the result may be a view of them. Methods are called under
    `torch.inference_mode()` on one thread, one step at a time.

    Attributes:
        kernels: Name of the kernels for logs and status pages.
    """

    kernels: ClassVar[str]

    def with_own_workspaces(self) -> Self:
        """Returns ops for steps that run concurrently with this one's: no step changes what the two share."""

    def prepare(self, batch: DeviceBatch) -> None:
        """Plans a step for all layers. Called before the batch's first `rope_store` and `attention`."""

    def pack(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Makes a linear layer of weight [out, in] and bias [out]. It may repack them: drop other references."""

    def pack_experts(self, weights: Iterable[tuple[Weight, Weight]], count: int, routing: Routing) -> Experts:
        """Makes a layer's experts.

        Args:
            weights: Each expert's gates and ups [2I, H], gate first, and down [H, I]. Those of one expert are packed
                before the next one's are asked for, so that few are in memory twice.
            count: E
        """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / sqrt(mean(x²) + eps) · weight: [T, H] -> new [T, H]. Does not change `x`."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Computes `residual += x` in place, rounded to the model's dtype, and returns the norm of the sum.

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
        """Normalises queries and keys per head if asked to, applies RoPE, and stores keys and values into the pages.

        Args:
            qkv: [T, (Hq + 2 Hkv) · D], scratch: all query heads, all key heads, all value heads.
            batch: Source of `positions` and `slots`.
            cos_sin: float32 [max_model_len, D]: D/2 cosines, then D/2 sines. Dimensions i and i + D/2 rotate together.
            q_norm, k_norm: RMSNorm weights [D], both or neither.
            eps: Epsilon of that norm.
            kv: [num_pages, 2, Hkv, BS, D], written at `batch.slots`.

        Returns:
            Queries [T, Hq, D].
        """

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Computes causal attention over the paged context. The step's own keys and values are already stored.

        Query i of sequence s has the position `context_lens[s] - query_len[s] + i`, and attends to that and all earlier
        positions of its sequence. Query head h uses key-value head `h // (Hq // Hkv)`.

        Args:
            q: [T, Hq, D], scratch.
            kv: [num_pages, 2, Hkv, BS, D]
            window: The last positions, its own included, that a query attends to; None for all.

        Returns:
            [T, Hq · D]
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) · up: [T, 2I], scratch, gate first -> [T, I]"""

    def top_k(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds the `count` largest of each row, descending, and their columns: [R, V] -> [R, count] twice.

        If `count` is 1, it is the first of equal ones. The values can be of `x`'s type or float32. `torch.topk` does
        the rest, but slowly for a whole vocabulary on a CPU.
        """

    def log_sum_exp(self, x: torch.Tensor) -> torch.Tensor:
        """Returns log(sum(e^x)) of each row: [R, V] -> float32 [R]. A logit minus it is a log-probability."""

    def draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Draws a token for each row: [R, V] -> int64 [R]. `engine/ops/draw.py` defines it."""

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Sets logits to minus infinity, in place, where bits of masks are 0.

        Args:
            logits: [R, V]
            rows: Different rows of them. int64 [K]
            masks: A mask for each of these rows: bit i % 32 of word i // 32 is token i's. int32 [K, (V + 31) // 32]
        """

    def fuse(self, stack: Stack) -> FusedStack | None:
        """Returns a faster way to run all layers than one operation at a time; None if this back end has none."""

    def with_fixed_buffers(self, max_tokens: int) -> "tuple[Self, FixedBuffers] | None":
        """Returns ops whose queries and attention outputs are in these buffers; None if this back end has none.

        All their calls but `prepare` and `attention` can be captured in CUDA graphs. They share this one's workspaces,
        so that only one step may run at a time.

        Args:
            max_tokens: Most tokens of a step.
        """

    def capturable_decodes(self, max_decodes: int, max_pages: int) -> "Callable[[int], Ops] | None":
        """Returns a maker of ops for steps of exactly so many decodes; None if this back end has none.

        All calls but their `prepare` can be captured in a CUDA graph. They share this one's workspaces, and the buffers
        that this call allocates on the current stream, so that only one step may run at a time.

        Args:
            max_decodes: Most decodes of a step.
            max_pages: Most pages of one sequence.
        """
