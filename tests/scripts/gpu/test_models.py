import math

import numpy as np
import pytest

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.model.parameters import expected_tensors
from scripts.gpu.models import (
    MODELS,
    attention_flop,
    kv_bytes,
    model_config,
    random_pages,
    step,
    step_bytes,
    step_flop,
)

GB = 1e9


@pytest.mark.parametrize(
    ("name", "parameters", "kv"),
    [("Llama-3-8B", 8.03e9, 128 << 10), ("Qwen3-8B", 8.19e9, 144 << 10), ("Qwen3-4B", 4.02e9, 144 << 10)],
)
def test_the_shapes_are_those_of_the_real_models(name: str, parameters: float, kv: int) -> None:
    config = model_config(MODELS[name])
    total = sum(math.prod(shape) for shape in expected_tensors(config).values())
    assert total == pytest.approx(parameters, rel=0.005)
    assert kv_bytes(config) == kv


def test_a_step_reads_the_weights_once_and_every_context() -> None:
    config = model_config(MODELS["Llama-3-8B"])
    alone, many = step_bytes(config, [(1, 1024)]), step_bytes(config, [(1, 1024)] * 64)
    # 8.03e9 parameters without the embedding of 128,256 x 4,096, of which a token reads only one row
    assert alone == pytest.approx(15.01 * GB + 1024 * kv_bytes(config), rel=0.001)
    assert many - alone == 63 * (1024 * kv_bytes(config) + 4096 * 2)


def test_a_tied_embedding_is_read_as_the_head() -> None:
    config = model_config(MODELS["Qwen3-4B"])
    assert step_bytes(config, [(1, 1)]) == pytest.approx(2 * 4.02e9, rel=0.005)


def test_a_prefill_computes_two_operations_a_weight_and_token_and_half_the_square_of_attention() -> None:
    config = model_config(MODELS["Qwen3-8B"])
    tokens = 8192
    attention = attention_flop(config, [(tokens, tokens)])
    assert attention == pytest.approx(4 * 36 * 32 * 128 * tokens**2 / 2, rel=0.001)
    linear = 2 * 6.95e9 * tokens  # all weights except embedding and head
    assert step_flop(config, [(tokens, tokens)]) == pytest.approx(linear + attention, rel=0.005)


def test_a_chunk_attends_to_what_came_before_it() -> None:
    config = model_config(MODELS["Qwen3-8B"])
    halves = attention_flop(config, [(512, 512)]) + attention_flop(config, [(512, 1024)])
    assert attention_flop(config, [(1024, 1024)]) == halves


def test_pages_are_all_different_and_page_zero_stays_empty() -> None:
    lens = [(1, 33), (1, 16), (7, 100)]
    pages = random_pages(lens, 30, np.random.default_rng(0))
    assert [len(row) for row in pages] == [3, 1, 7]
    used = [page for row in pages for page in row]
    assert len(set(used)) == len(used)
    assert 0 not in used
    assert max(used) < 30
    with pytest.raises(ValueError, match="pool of 11 pages does not hold 11"):
        random_pages(lens, 11, np.random.default_rng(0))


def test_a_step_is_a_batch_as_the_engine_makes_them() -> None:
    lens = [(1, 17), (1, 1), (5, 20)]
    rng = np.random.default_rng(0)
    pages = random_pages(lens, 20, rng)
    batch = step(lens, pages, 100, rng)
    assert batch.num_decodes == 2
    assert batch.query_start.tolist() == [0, 1, 2, 7]
    assert batch.positions.tolist() == [16, 0, 15, 16, 17, 18, 19]
    assert batch.slots[0] == pages[0][1] * BLOCK_SIZE
    assert batch.slots[2:4].tolist() == [pages[2][0] * BLOCK_SIZE + 15, pages[2][1] * BLOCK_SIZE]
    assert [sample.row for sample in batch.samples] == [0, 1, 6]
    assert [sample.position for sample in batch.samples] == [17, 1, 20]
    assert all(array.dtype == np.int32 for array in (batch.token_ids, batch.positions, batch.slots, batch.query_start))
    for table, (_, context), row in zip(batch.block_tables, lens, pages, strict=True):
        assert table[: blocks_for(context)].tolist() == row
