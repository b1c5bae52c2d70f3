"""Quantised models against transformers with the dequantised weights, in float32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpd.common.errors import CheckpointError, ConfigError
from engine.execution.runner import TorchRunner
from engine.model.config import Quantization, load_config
from engine.model.parameters import head_of, parameters
from engine.ops.base import DeviceBatch
from engine.ops.quantized import quantize
from tests.checkpoints import FAMILIES, oracle_logits
from tests.conftest import MakeCheckpoint
from tests.engine.execution.test_runner import prompt_of
from tests.engine.paging import Pager

FORMATS: list[Quantization] = ["int8", "int4"]
CASES = [
    (family, quantization, ("float32", "bfloat16")[(index + number) % 2])
    for index, family in enumerate(FAMILIES)
    for number, quantization in enumerate(FORMATS)
]
"""Each family in both formats and both types."""
WHOLE_GROUPS = {"intermediate_size": 192, "moe_intermediate_size": 64, "tie_word_embeddings": False}
CPU = torch.device("cpu")


def load(directory: Path, quantization: Quantization, dtype: str = "float32", **settings: Any) -> TorchRunner:
    given = {"device": "cpu", "kv_bytes": 32 << 20, "max_model_len": 0, **settings}
    return TorchRunner(directory, dtype=dtype, quantization=quantization, **given)


@pytest.fixture
def dequantized(tmp_path: Path) -> Callable[[Path, Quantization], Path]:
    """Makes a copy of a checkpoint whose weights are what quantising leaves of them."""

    def make(directory: Path, quantization: Quantization) -> Path:
        copy = Path(shutil.copytree(directory, tmp_path / "dequantized"))
        tensors, config = load_file(directory / "model.safetensors"), load_config(directory)
        for parameter in parameters(config):
            if (bits := parameter.bits(quantization)) is None:
                continue
            for layer in [None] if parameter.layers is None else parameter.layers:
                for expert in range(parameter.experts or 1):
                    for name in parameter.tensors("weight", layer, expert):
                        tensors[name] = quantize(tensors[name], bits).dequantize()
        (copy / "model.safetensors").unlink()
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return copy

    return make


def logits_of(runner: TorchRunner, tokens: list[int]) -> torch.Tensor:
    pager = Pager(runner)
    batch = DeviceBatch.of(pager.batch([(pager.start(tokens), len(tokens))]), CPU)
    kv = [runner.pool[:, layer] for layer in range(runner.config.num_layers)]
    with torch.inference_mode():
        logits = runner._model.forward(batch, kv, None)
    assert logits is not None
    return logits.float()


@pytest.mark.parametrize(("family", "quantization", "dtype"), CASES)
def test_logits_are_those_of_the_dequantised_weights(
    checkpoint: MakeCheckpoint,
    dequantized: Callable[[Path, Quantization], Path],
    family: str,
    quantization: Quantization,
    dtype: str,
) -> None:
    """The tolerance is for the error of a token's logits relative to them, in the median of the tokens.

    These models amplify errors, in bf16 also without quantisation. Where two experts are about equally probable, the
    error of the activations chooses the other one.
    """
    directory = checkpoint(family, **WHOLE_GROUPS)
    tokens = prompt_of(90)
    expected = oracle_logits(dequantized(directory, quantization), tokens)
    runner = load(directory, quantization, dtype)
    assert runner.dtype == f"{dtype} with {'int8' if quantization == 'int8' else 'int4 and int8'} weights"
    error = (logits_of(runner, tokens) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < (0.1 if dtype == "float32" else 0.2)


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_prompt_in_chunks_and_a_batch_has_the_same_bits(
    checkpoint: MakeCheckpoint, quantization: Quantization
) -> None:
    runner = load(checkpoint("qwen3_moe", **WHOLE_GROUPS), quantization)
    pager, prompts = Pager(runner), [prompt_of(length, seed=length) for length in (75, 30, 120)]
    alone = [pager.generate(pager.start(prompt), 16) for prompt in prompts]
    chunked = [pager.generate(pager.start(prompt), 16, 7) for prompt in prompts]
    together = [pager.start(prompt) for prompt in prompts]
    while len(together[0].output) < 16:
        pager.step([(sequence, sequence.remaining) for sequence in together])
    assert alone == chunked == [sequence.output for sequence in together]


def test_a_head_that_is_the_embedding_is_quantised_and_the_embedding_is_not(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3", **{**WHOLE_GROUPS, "tie_word_embeddings": True})
    runner = load(directory, "int8")
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(runner._model.embed(torch.arange(len(embedding))), embedding)
    hidden = torch.randn(4, 64)
    expected = hidden @ quantize(embedding, 8).dequantize().T
    assert (runner._model.head(hidden) - expected).norm() < 0.01 * expected.norm()
    assert head_of(runner.config).tensors("weight") == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("quantization", FORMATS)
def test_workers_of_other_formats_exchange_no_pages(checkpoint: MakeCheckpoint, quantization: Quantization) -> None:
    directory = checkpoint("llama3", **WHOLE_GROUPS)
    fingerprints = {load(directory, each).fingerprint for each in ("none", quantization)}
    assert len(fingerprints) == 2
    assert load(directory, quantization).fingerprint in fingerprints


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_decode_reads_the_bytes_of_its_quantised_experts(
    checkpoint: MakeCheckpoint, quantization: Quantization
) -> None:
    runner = load(checkpoint("mixtral", **WHOLE_GROUPS), quantization)
    experts = runner.config.experts
    assert experts is not None
    pager = Pager(runner)
    pager.step([(pager.start(prompt_of(1)), 1)])
    elements = runner.config.num_layers * experts.per_token * 3 * experts.width * runner.config.hidden_size
    assert runner._model.expert_bytes == elements * (34 if quantization == "int8" else 18) // 32


def test_rows_that_are_not_whole_groups_are_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"groups of 32 columns, which do not divide the 176 of mlp\.down_proj"):
        load(checkpoint("llama2"), "int8")


def test_float16_is_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match="not computed in float16; use --dtype bfloat16"):
        load(checkpoint("llama2", **WHOLE_GROUPS), "int8", "float16")


def test_without_compiled_kernels_quantised_weights_are_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="quantised weights and KV pages need the compiled CPU kernels: no C"):
        load(checkpoint("llama2", **WHOLE_GROUPS), "int4")


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(checkpoint: MakeCheckpoint, tmp_path: Path, number: float) -> None:
    copy = Path(shutil.copytree(checkpoint("llama2", **WHOLE_GROUPS), tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 40] = number
    (copy / "model.safetensors").unlink()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight cannot be quantised: .* not finite"):
        load(copy, "int8")


def test_planned_memory_is_that_of_the_packed_weights(checkpoint: MakeCheckpoint) -> None:
    from engine.execution.memory_plan import plan_memory
    from engine.model.weights import Checkpoint

    directory = checkpoint("llama2", **WHOLE_GROUPS)
    fields = json.loads((directory / "config.json").read_text())
    hidden, layers, vocab = fields["hidden_size"], fields["num_hidden_layers"], fields["vocab_size"]
    in_layers = layers * (4 * hidden * hidden + 3 * hidden * 192)
    others = vocab * hidden + (2 * layers + 1) * hidden
    with Checkpoint(directory) as opened:
        for quantization, bytes_a_group in zip(FORMATS, (34, 18), strict=True):
            plan = plan_memory(
                load_config(directory), opened, dtype="bfloat16", quantization=quantization, max_model_len=0
            )
            assert plan.weight_bytes == 2 * others + in_layers * bytes_a_group // 32 + vocab * hidden * 34 // 32


# --- Pages


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_of_8_bits_change_logits_little(checkpoint: MakeCheckpoint, family: str) -> None:
    directory, tokens = checkpoint(family), prompt_of(90)
    expected = oracle_logits(directory, tokens)
    runner = load(directory, "none", kv_dtype="int8")
    assert runner.dtype == "float32 with int8 KV pages"
    error = (logits_of(runner, tokens) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < 0.1


@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
def test_pages_of_8_bits_are_the_same_whatever_the_chunks_and_batches(checkpoint: MakeCheckpoint, family: str) -> None:
    runner = load(checkpoint(family), "none", kv_dtype="int8")
    pager, prompts = Pager(runner), [prompt_of(length, seed=length) for length in (75, 30, 120)]
    alone = [pager.generate(pager.start(prompt), 16) for prompt in prompts]
    chunked = [pager.generate(pager.start(prompt), 16, 7) for prompt in prompts]
    together = [pager.start(prompt) for prompt in prompts]
    while len(together[0].output) < 16:
        pager.step([(sequence, sequence.remaining) for sequence in together])
    assert alone == chunked == [sequence.output for sequence in together]


def test_a_page_of_8_bits_has_a_scale_for_each_token_and_head(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3")
    plain, small = load(directory, "none"), load(directory, "none", kv_dtype="int8")
    layers, kv_heads, dim = plain.config.num_layers, plain.config.num_kv_heads, plain.config.head_dim
    assert plain.page_bytes == layers * 2 * kv_heads * 16 * dim * 4
    assert small.page_bytes == layers * 2 * kv_heads * 16 * (dim + 4)
    assert small.num_pages == (32 << 20) // small.page_bytes
    assert small.pool.nbytes == small.num_pages * small.page_bytes
    assert small.fingerprint != plain.fingerprint


def test_pages_of_8_bits_are_refused_in_float16(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match="KV pages are not computed in float16"):
        load(checkpoint("llama2"), "none", "float16", kv_dtype="int8")
