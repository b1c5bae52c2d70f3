"""Shapes of real models, steps of them, and the bytes and operations of a step."""

import itertools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Batch, SampleRow
from engine.model.config import ModelConfig, load_config
from engine.model.parameters import expected_tensors
from engine.types import SamplingParams

BF16_BYTES = 2

Lens = Sequence[tuple[int, int]]
"""(tokens to compute, context length) of each sequence of a step. Decodes come first."""


_SHARED: Mapping[str, object] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "Llama-3-8B": {
        **_SHARED,
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "Qwen3-8B": {
        **_SHARED,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
    },
    "Qwen3-4B": {
        **_SHARED,
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
"""config.json fields that decide the speed of some models. Positions are limited to those the experiments use."""


def model_config(fields: Mapping[str, object]) -> ModelConfig:
    """The configuration of a config.json with these fields."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        return load_config(Path(folder))


def kv_bytes(config: ModelConfig) -> int:
    """Bytes of one token's keys and values in all layers, in bfloat16."""
    return config.page_bytes("bfloat16") // BLOCK_SIZE


def step_bytes(config: ModelConfig, lens: Lens) -> int:
    """Least bytes that a step reads: every weight once, and the keys and values of all contexts.

    Counts only the rows of the embedding that are looked up, and no activations: both are small.
    """
    shapes = expected_tensors(config)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name != "model.embed_tokens.weight")
    if config.tie_embeddings:  # then it is the LM head, too
        weights += math.prod(shapes["model.embed_tokens.weight"])
    rows = sum(count for count, _ in lens) * config.hidden_size
    return (weights + rows) * BF16_BYTES + kv_bytes(config) * sum(context for _, context in lens)


def step_flop(config: ModelConfig, lens: Lens) -> int:
    """Operations of a step on the matrix units, two per multiply-add. One row per sequence reaches the LM head."""
    shapes = expected_tensors(config)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj.weight"))
    head = config.vocab_size * config.hidden_size
    return 2 * (sum(count for count, _ in lens) * weights + len(lens) * head) + attention_flop(config, lens)


def attention_flop(config: ModelConfig, lens: Lens) -> int:
    """Operations of attention in all layers, a part of `step_flop`."""
    pairs = sum(count * (context - count) + count * (count + 1) // 2 for count, context in lens)
    return 4 * config.num_layers * config.num_heads * config.head_dim * pairs


def random_pages(lens: Lens, num_pages: int, rng: np.random.Generator) -> list[list[int]]:
    """Distinct random pages for each sequence from a pool of `num_pages`, without page 0.

    Raises:
        ValueError: The pool is too small.
    """
    counts = [blocks_for(context) for _, context in lens]
    if sum(counts) >= num_pages:
        raise ValueError(f"a pool of {num_pages} pages does not hold {sum(counts)} and the empty page 0")
    order = (rng.permutation(num_pages - 1) + 1).tolist()
    ends = np.cumsum([0, *counts]).tolist()
    return [order[begin:end] for begin, end in itertools.pairwise(ends)]


def step(lens: Lens, pages: Sequence[Sequence[int]], vocab_size: int, rng: np.random.Generator) -> Batch:
    """A step with random tokens over sequences in these pages. Each samples its next token greedily."""
    tables = np.zeros((len(lens), max(map(len, pages))), np.int32)
    spans = [np.arange(context - count, context) for count, context in lens]
    for table, row in zip(tables, pages, strict=True):
        table[: len(row)] = row
    slots = [
        table[span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE for table, span in zip(tables, spans, strict=True)
    ]
    query_start = np.cumsum([0, *map(len, spans)], dtype=np.int32)
    greedy = SamplingParams(temperature=0.0)
    before = rng.integers(vocab_size, size=max(context for _, context in lens), dtype=np.int32)
    return Batch(
        token_ids=rng.integers(vocab_size, size=query_start[-1], dtype=np.int32),
        positions=np.concatenate(spans).astype(np.int32),
        slots=np.concatenate(slots).astype(np.int32),
        query_start=query_start,
        context_lens=np.array([context for _, context in lens], np.int32),
        block_tables=tables,
        num_decodes=sum(count == 1 for count, _ in lens),
        samples=[
            SampleRow(int(end) - 1, greedy, 0, context, before[:context], context)
            for end, (_, context) in zip(query_start[1:], lens, strict=True)
        ],
    )
