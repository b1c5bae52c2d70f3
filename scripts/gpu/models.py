"""Shapes of real models, what a step of them must move and compute, and their decoder with random weights.

Speed does not depend on the values of weights, so the experiments need no checkpoints.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from cpd.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Batch
from engine.config import ModelConfig, RopeConfig
from engine.weights import expected_tensors

BF16_BYTES = 2

Lens = Sequence[tuple[int, int]]
"""Of each sequence of a step: tokens to compute, and tokens that the last of them attends to. Decodes come first."""


def llama3_8b() -> ModelConfig:
    """Llama 3 8B."""
    return _config("llama", layers=32, hidden=4096, width=14336, vocab=128256, theta=500_000.0)


def qwen3_8b() -> ModelConfig:
    """Qwen3 8B."""
    return _config("qwen3", layers=36, hidden=4096, width=12288, vocab=151936, theta=1_000_000.0)


def qwen3_4b() -> ModelConfig:
    """Qwen3 4B."""
    return _config("qwen3", layers=36, hidden=2560, width=9728, vocab=151936, theta=1_000_000.0, tied=True)


def _config(
    family: str, *, layers: int, hidden: int, width: int, vocab: int, theta: float, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        rope=RopeConfig(theta=theta),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=family == "qwen3",
        tie_embeddings=tied,
        sliding_window=None,
        max_model_len=16384,
        eos_token_ids=(),
        dtype="bfloat16",
    )


def kv_bytes(config: ModelConfig) -> int:
    """Keys and values of one token in all layers, in bfloat16."""
    return config.page_bytes("bfloat16") // BLOCK_SIZE


def step_bytes(config: ModelConfig, lens: Lens) -> int:
    """Bytes that a step must read at least: every weight once, and all keys and values that it attends to.

    Of the embedding only the rows that are looked up count, and activations do not: both are small.
    """
    shapes = expected_tensors(config)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name != "model.embed_tokens.weight")
    if config.tie_embeddings:  # then it is the LM head, too
        weights += math.prod(shapes["model.embed_tokens.weight"])
    rows = sum(count for count, _ in lens) * config.hidden_size
    return (weights + rows) * BF16_BYTES + kv_bytes(config) * sum(context for _, context in lens)


def step_flop(config: ModelConfig, lens: Lens) -> int:
    """Operations of a step on the matrix units, two a multiply-add. One row a sequence reaches the LM head."""
    shapes = expected_tensors(config)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj.weight"))
    head = config.vocab_size * config.hidden_size
    return 2 * (sum(count for count, _ in lens) * weights + len(lens) * head) + attention_flop(config, lens)


def attention_flop(config: ModelConfig, lens: Lens) -> int:
    """The part of `step_flop` that attention computes, in all layers."""
    pairs = sum(count * (context - count) + count * (count + 1) // 2 for count, context in lens)
    return 4 * config.num_layers * config.num_heads * config.head_dim * pairs


class RandomCheckpoint:
    """Stands in for `engine.weights.Checkpoint`: gives every tensor of a model, random, made on the device."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_tensors(config)

    def read(self, names: Sequence[str], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `engine.weights.Checkpoint.read`. Norms are near one, the rest small enough to stay finite."""
        shapes = [self._shapes[name] for name in names]
        joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=device)
        if joined.dim() == 1:
            return joined.uniform_(0.9, 1.1)
        return joined.normal_(std=joined.shape[-1] ** -0.5)


def random_pages(lens: Lens, num_pages: int, rng: np.random.Generator) -> list[list[int]]:
    """Pages of each sequence, scattered over a pool of `num_pages`, never page 0; all are different.

    Raises:
        ValueError: The pool is too small.
    """
    counts = [blocks_for(context) for _, context in lens]
    if sum(counts) >= num_pages:
        raise ValueError(f"a pool of {num_pages} pages does not hold {sum(counts)} and the one that stays empty")
    order = (rng.permutation(num_pages - 1) + 1).tolist()
    ends = np.cumsum([0, *counts]).tolist()
    return [order[begin:end] for begin, end in itertools.pairwise(ends)]


def step(lens: Lens, pages: Sequence[Sequence[int]], vocab_size: int, rng: np.random.Generator) -> Batch:
    """A step with random tokens over sequences that lie in these pages. Decodes must come first."""
    tables = np.zeros((len(lens), max(map(len, pages))), np.int32)
    positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    slots: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for table, row, (count, context) in zip(tables, pages, lens, strict=True):
        table[: len(row)] = row
        span = np.arange(context - count, context)
        positions.append(span)
        slots.append(np.asarray(row)[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE)
    total = sum(count for count, _ in lens)
    return Batch(
        token_ids=rng.integers(vocab_size, size=total, dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        query_start=np.cumsum([0, *(count for count, _ in lens)], dtype=np.int32),
        context_lens=np.array([context for _, context in lens], np.int32),
        block_tables=tables,
        num_decodes=sum(count == 1 for count, _ in lens),
        samples=[],
    )
