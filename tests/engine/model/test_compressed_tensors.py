"""Checkpoints of compressed-tensors: their logits are those of the weights that the library itself decompresses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from cpd.common.errors import CheckpointError, ConfigError
from engine.execution.runner import TorchRunner
from engine.model.checkpoint import open_checkpoint
from engine.model.config import load_config
from engine.model.parameters import parameters
from engine.ops.quantized import QuantizedWeight
from tests.checkpoints import oracle_logits
from tests.conftest import MakeCheckpoint
from tests.engine.execution.test_quantization import WHOLE_GROUPS, logits_of
from tests.engine.execution.test_runner import prompt_of

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
SCHEMES: dict[str, tuple[str, dict[str, Any], str]] = {
    "W8A8": ("int-quantized", INT8, "bfloat16 with int8 weights"),
    "W8A8, one scale": ("int-quantized", {**INT8, "strategy": "tensor"}, "bfloat16 with int8 weights"),
    "W8A16": ("pack-quantized", INT8, "bfloat16 with int8 weights"),
    "W4A16": ("pack-quantized", INT4, "bfloat16 with int4 weights"),
    "W4A16, groups of 32": ("pack-quantized", {**INT4, "group_size": 32}, "bfloat16 with int4 weights"),
    "FP8": ("float-quantized", FP8, "bfloat16"),
    "FP8, one scale": ("float-quantized", {**FP8, "strategy": "tensor"}, "bfloat16"),
}

Compress = Callable[..., tuple[Path, Path]]


def scale_of(weight: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    most = 448.0 if weights["type"] == "float" else 2 ** (weights["num_bits"] - 1) - 0.5
    if weights["strategy"] == "tensor":
        return weight.abs().amax().view(1) / most
    return weight.view(len(weight), -1, weights.get("group_size", weight.shape[1])).abs().amax(-1) / most


@pytest.fixture
def compress(tmp_path: Path) -> Compress:
    """Makes two copies of a checkpoint: quantised, and with the weights that the library makes of those."""

    def make(original: Path, name: str, weights: dict[str, Any]) -> tuple[Path, Path]:
        copies = tmp_path / "compressed", tmp_path / "decompressed"
        compressed = load_file(original / "model.safetensors")
        decompressed, scheme = (
            dict(compressed),
            QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights)),
        )
        compressor = BaseCompressor.get_value_from_registry(name)
        config = load_config(original)
        for parameter in parameters(config):
            if not parameter.can_be_quantized or parameter.name == "head":
                continue
            for layer in parameter.layers or []:
                for expert in range(parameter.experts or 1):
                    for tensor in parameter.tensors("weight", layer, expert):
                        weight = compressed.pop(tensor)
                        given = {"weight": weight, "weight_scale": scale_of(weight, weights)}
                        parts = compressor.compress(given, scheme)
                        compressed |= {tensor.removesuffix("weight") + part: value for part, value in parts.items()}
                        decompressed[tensor] = compressor.decompress(parts, scheme)["weight"]
        for copy, tensors in zip(copies, (compressed, decompressed), strict=True):
            shutil.copytree(original, copy)
            (copy / "model.safetensors").unlink()
            save_file(
                {key: value.contiguous() for key, value in tensors.items()},
                copy / "model.safetensors",
                {"format": "pt"},
            )
        describe(copies[0], name, weights)
        return copies

    return make


def describe(directory: Path, name: str, weights: dict[str, Any], **fields: Any) -> None:
    """Writes the quantization_config of a checkpoint."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": {**quantization, **fields}})
    )


def load(directory: Path, **settings: Any) -> TorchRunner:
    given = {"dtype": "auto", "device": "cpu", "kv_bytes": 32 << 20, "max_model_len": 0, **settings}
    return TorchRunner(directory, **given)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [*(("qwen2", scheme) for scheme in SCHEMES), *(("qwen3_moe", scheme) for scheme in ("W8A8", "W4A16", "FP8"))],
)
def test_logits_are_those_of_the_decompressed_weights(
    checkpoint: MakeCheckpoint, compress: Compress, family: str, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, weights, dtype = SCHEMES[scheme]
    compressed, decompressed = compress(checkpoint(family, **WHOLE_GROUPS), name, weights)
    tokens = prompt_of(60)
    expected = oracle_logits(decompressed, tokens)
    assert load(compressed).dtype == dtype
    error = (logits_of(load(compressed, dtype="float32"), tokens) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.median() < (1e-5 if "float" in name else 0.1)
    assert "are not used" not in caplog.text


def test_the_older_name_of_the_configuration_is_read(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("qwen3", **WHOLE_GROUPS), tmp_path / "model"))
    describe(directory, "int-quantized", INT8)
    expected, file = load_config(directory).scheme, directory / "config.json"
    file.write_text(file.read_text().replace("quantization_config", "compression_config"))
    assert load_config(directory).scheme == expected is not None


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "FP8" not in name])
def test_weights_are_those_that_the_library_decompresses(
    checkpoint: MakeCheckpoint, compress: Compress, scheme: str
) -> None:
    name, weights, _ = SCHEMES[scheme]
    compressed, decompressed = compress(checkpoint("qwen3", **WHOLE_GROUPS), name, weights)
    expected = load_file(decompressed / "model.safetensors")
    with open_checkpoint(compressed, load_config(compressed)) as opened:
        for part in ("self_attn.q_proj", "mlp.down_proj"):
            tensor = f"model.layers.1.{part}.weight"
            weight = opened.read_weight([tensor], torch.float32, torch.device("cpu"))
            assert isinstance(weight, QuantizedWeight)
            torch.testing.assert_close(weight.dequantize(), expected[tensor], rtol=2**-10, atol=0.0)


def test_weights_of_8_bit_floats_can_be_quantised_at_start(checkpoint: MakeCheckpoint, compress: Compress) -> None:
    compressed, decompressed = compress(checkpoint("qwen3", **WHOLE_GROUPS), "float-quantized", FP8)
    runner = load(compressed, dtype="float32", quantization="int8")
    assert runner.dtype == "float32 with int8 weights"
    expected = logits_of(load(decompressed, dtype="float32", quantization="int8"), prompt_of(30))
    assert torch.equal(logits_of(runner, prompt_of(30)), expected)


def test_quantised_weights_are_not_quantised_again(checkpoint: MakeCheckpoint, compress: Compress) -> None:
    compressed, _ = compress(checkpoint("qwen3", **WHOLE_GROUPS), "int-quantized", INT8)
    with pytest.raises(ConfigError, match=r"quantised already .* has 8 bits\); use --quantization none"):
        load(compressed, quantization="int8")


@pytest.mark.parametrize("scale", [0.0, torch.nan, torch.inf, -1.0])
def test_scales_that_are_no_scales_are_refused(checkpoint: MakeCheckpoint, compress: Compress, scale: float) -> None:
    compressed, _ = compress(checkpoint("qwen3", **WHOLE_GROUPS), "int-quantized", INT8)
    tensors = load_file(compressed / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][5] = scale
    (compressed / "model.safetensors").unlink()
    save_file(tensors, compressed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight_scale has a scale that is not over 0"):
        load(compressed)


@pytest.mark.parametrize(
    ("tensor", "change", "sentence"),
    [
        ("weight_scale", lambda scale: scale.T.contiguous(), r"weight_scale has shape \[1, 192\], which does not fit"),
        ("weight_scale", lambda scale: scale[:3].clone(), r"weight_scale has shape \[3, 1\], which does not fit"),
        ("weight", lambda weight: weight.float(), r"weight is F32 \[192, 64\], not I8"),
        ("weight", lambda weight: weight[:, :32].clone(), r"has shape \[192, 32\], but config\.json asks for"),
        ("weight", lambda weight: None, "is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    checkpoint: MakeCheckpoint, compress: Compress, tensor: str, change: Callable[..., Any], sentence: str
) -> None:
    compressed, _ = compress(checkpoint("qwen3", **WHOLE_GROUPS), "int-quantized", INT8)
    tensors = load_file(compressed / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{tensor}"
    changed = change(tensors.pop(name))
    (compressed / "model.safetensors").unlink()
    save_file(tensors if changed is None else {**tensors, name: changed}, compressed / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        load(compressed)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"quant_method": "awq"}, "the weights are quantised by awq; what can be read are compressed-tensors"),
        ({"quant_method": "gptq"}, "quantised by gptq; what can be read are"),
        ({"config_groups": {}}, "its config_groups name no weights"),
        ({"weights": {"num_bits": 3}}, "its weights are int3"),
        ({"weights": {"symmetric": False}}, "its int8 weights have zero points"),
        ({"weights": {"strategy": "block"}}, "the strategy of its int8 weights is block"),
        ({"weights": {"strategy": "group", "group_size": 0}}, "the group_size of its int8 weights is 0"),
        ({"weights": {"strategy": "group", "group_size": 24}}, "groups of 24, which must be multiples of 32"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "its weights are rotated"),
        ({"format": "marlin-24"}, "stored as marlin-24"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "stored without their zeros, as sparse-24-bitmask; what",
        ),
    ],
)
def test_other_schemes_are_refused_with_what_can_be_read(
    checkpoint: MakeCheckpoint, tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    directory = Path(shutil.copytree(checkpoint("qwen3", **WHOLE_GROUPS), tmp_path / "model"))
    weights = {**INT8, **fields.pop("weights", {})}
    describe(directory, "int-quantized", weights, **fields)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
