from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.model.config import RopeConfig, load_config
from engine.model.rope import rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.7},
        LLAMA3,
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        {**LLAMA3, "factor": 3.3, "low_freq_factor": 1.1, "high_freq_factor": 3.7},
        YARN,
        {**YARN, "attention_factor": 0.75},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "truncate": False},
        {**YARN, "factor": 1.0},
        {**YARN, "original_max_position_embeddings": 4096, "factor": 40.0},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_the_table_is_that_of_transformers(tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
    theirs = LlamaConfig(head_dim=head_dim, rope_parameters=rope, architectures=["LlamaForCausalLM"])
    theirs.save_pretrained(tmp_path)
    length = 2000
    table = rope_table(load_config(tmp_path).rope, head_dim, length, torch.device("cpu"))

    oracle = LlamaRotaryEmbedding(theirs)
    cos, sin = oracle(torch.zeros(1), torch.arange(length)[None])
    assert table.shape == (length, head_dim)
    assert torch.equal(table[:, : head_dim // 2], cos[0, :, : head_dim // 2])
    assert torch.equal(table[:, head_dim // 2 :], sin[0, :, : head_dim // 2])


def test_position_zero_is_not_rotated() -> None:
    table = rope_table(RopeConfig(), 8, 1, torch.device("cpu"))
    assert table.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
