import math

import pytest

from engine.execution.memory_plan import plan_memory
from engine.model.config import load_config
from engine.model.parameters import expected_tensors, parameters
from engine.model.weights import Checkpoint
from tests.checkpoints import FAMILIES
from tests.conftest import MakeCheckpoint


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_expected_tensors_are_those_that_transformers_writes(
    checkpoint: MakeCheckpoint, family: str, tied: bool
) -> None:
    directory = checkpoint(family, tie_word_embeddings=tied)
    tensors = expected_tensors(load_config(directory))
    with Checkpoint(directory) as opened:
        opened.check(tensors)
        assert opened.unused(tensors) == []


def test_biases_that_the_config_asks_for_are_expected(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("llama3", attention_bias=True, mlp_bias=True)
    tensors = expected_tensors(load_config(directory))
    with Checkpoint(directory) as opened:
        opened.check(tensors)
        assert opened.unused(tensors) == []


def test_queries_keys_and_values_are_one_parameter_and_so_are_gate_and_up(checkpoint: MakeCheckpoint) -> None:
    table = {parameter.name: parameter for parameter in parameters(load_config(checkpoint("qwen2")))}
    assert table["qkv"].tensors("bias", 1) == [f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"]
    assert table["gate_up"].tensors("weight", 0) == [
        f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")
    ]
    assert table["norm"].tensors("weight") == ["model.norm.weight"]


def test_experts_have_tensors_of_their_own(checkpoint: MakeCheckpoint) -> None:
    table = {parameter.name: parameter for parameter in parameters(load_config(checkpoint("mixtral")))}
    assert "gate_up" not in table
    assert table["router"].tensors("weight", 1) == ["model.layers.1.block_sparse_moe.gate.weight"]
    assert table["expert_gate_up"].tensors("weight", 1, 3) == [
        f"model.layers.1.block_sparse_moe.experts.3.{part}.weight" for part in ("w1", "w3")
    ]


def test_layers_with_and_without_experts_may_alternate(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3_moe", decoder_sparse_step=2)
    table = {parameter.name: parameter for parameter in parameters(load_config(directory))}
    assert (table["gate_up"].layers, table["expert_down"].layers) == ([0, 2], (1,))
    with Checkpoint(directory) as opened:
        opened.check(expected_tensors(load_config(directory)))
        assert opened.unused(expected_tensors(load_config(directory))) == []


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_planned_memory_is_that_of_all_tensors(checkpoint: MakeCheckpoint, family: str) -> None:
    directory = checkpoint(family)
    with Checkpoint(directory) as opened:
        plan = plan_memory(load_config(directory), opened, dtype="bfloat16", max_model_len=0)
        assert plan.weight_bytes == 2 * sum(math.prod(entry.shape) for _, entry in opened.entries())
    assert (plan.dtype, plan.kv_dtype) == ("bfloat16", "bfloat16")
    assert plan.page_bytes == plan.config.page_bytes(plan.kv_dtype)
