import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cpd.common.errors import CheckpointError
from engine.model.config import load_config
from engine.model.fingerprint import model_fingerprint
from engine.model.parameters import expected_tensors
from engine.model.weights import Checkpoint
from models.tiny import CHECKPOINT
from tests.conftest import MakeCheckpoint

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[..., Path]:
    """Makes a copy of a checkpoint, which the test may damage."""

    def make(family: str, **overrides: object) -> Path:
        return Path(shutil.copytree(checkpoint(family, **overrides), tmp_path / "model"))

    return make


def check(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        checkpoint.check(expected_tensors(load_config(directory)))


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()  # the old file may still be mapped
    save_file(tensors, path)


@pytest.mark.parametrize("shard", ["1GB", "40KB"])
def test_tensors_are_joined_and_cast(checkpoint: MakeCheckpoint, shard: str) -> None:
    directory = checkpoint("qwen2", max_shard_size=shard)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    with Checkpoint(directory) as opened:
        joined = opened.read(names, torch.bfloat16, CPU)
    tensors: dict[str, torch.Tensor] = {}
    files = list(directory.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "40KB")
    for path in files:
        tensors |= load_file(path)
    assert torch.equal(joined, torch.cat([tensors[name] for name in names]).bfloat16())


@pytest.mark.parametrize("count", [4, 16])
def test_experts_that_do_not_fit_the_router_are_refused(copy: Callable[..., Path], count: int) -> None:
    directory = copy("qwen3_moe")  # with 8
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    name = "num_experts" if "num_experts" in fields else "num_local_experts"
    path.write_text(json.dumps({**fields, name: count}))
    asked = rf"mlp\.gate\.weight has shape \[8, 64\], but config\.json asks for \[{count}, 64\]"
    with pytest.raises(CheckpointError, match=asked):
        check(directory)


def test_a_missing_expert_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {name} is missing")):
        check(directory)


def test_a_missing_weight_file_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("llama2")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        check(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be used"):
        check(directory)


@pytest.mark.parametrize("length", [0, 4, 8, 100, 10_000, -1])
def test_a_truncated_file_is_named(copy: Callable[..., Path], length: int) -> None:
    path = copy("llama2") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        check(path.parent)


def test_a_file_of_something_else_is_named(copy: Callable[..., Path]) -> None:
    path = copy("llama2") / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 800000\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors file"):
        check(path.parent)


def test_a_missing_shard_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("llama2", max_shard_size="200KB")
    sorted(directory.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors is missing"):
        check(directory)


def test_a_shard_without_a_listed_tensor_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("llama2", max_shard_size="200KB")
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.layers.9.extra"] = next(iter(index["weight_map"].values()))
    (directory / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.extra is missing"):
        check(directory)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_a_damaged_index_is_named(copy: Callable[..., Path], content: str) -> None:
    directory = copy("llama2", max_shard_size="200KB")
    (directory / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        check(directory)


def test_an_index_cannot_lead_out_of_the_directory(copy: Callable[..., Path]) -> None:
    directory = copy("llama2", max_shard_size="200KB")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "../model/config.json"}}))
    with pytest.raises(CheckpointError, match=r"\.\./model/config\.json"):
        check(directory)


def test_a_missing_tensor_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("llama2")
    edit(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        check(directory)


def test_a_tensor_of_the_wrong_shape_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("llama2")
    edit(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[63\].*asks for \[64\]"):
        check(directory)


def test_a_tensor_of_an_unsupported_type_is_named(copy: Callable[..., Path]) -> None:
    directory = copy("llama2")
    edit(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has type I8"):
        check(directory)


def fingerprint(directory: Path) -> bytes:
    return model_fingerprint(directory, load_config(directory), "float32", "float32")


def test_sharding_and_context_length_do_not_change_the_fingerprint(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("llama2")
    config = load_config(directory)
    whole = model_fingerprint(directory, config, "float32", "float32")
    assert model_fingerprint(directory, replace(config, max_model_len=7), "float32", "float32") == whole
    assert fingerprint(checkpoint("llama2", max_shard_size="200KB")) == whole


def test_the_fingerprint_of_a_dense_model_is_that_of_earlier_releases() -> None:
    """Otherwise their workers would refuse this release's during a rolling upgrade."""
    assert fingerprint(CHECKPOINT).hex() == "8c57c9b3ff8711f35dc3a1d4b81e8cc6"


def test_windows_and_experts_change_the_fingerprint(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3_moe")
    config = load_config(directory)
    assert config.experts is not None
    variants = [
        config,
        replace(config, windows=(64, None, None)),
        replace(config, windows=(64, 64, None)),
        replace(config, experts=replace(config.experts, per_token=2)),
        replace(config, experts=replace(config.experts, normalize=False)),
    ]
    assert len({model_fingerprint(directory, variant, "float32", "float32") for variant in variants}) == len(variants)


def test_types_and_scaling_change_the_fingerprint(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("llama2")
    config = load_config(directory)
    variants = {
        model_fingerprint(directory, config, "float32", "float32"),
        model_fingerprint(directory, config, "bfloat16", "bfloat16"),
        model_fingerprint(directory, config, "bfloat16", "float32"),
        model_fingerprint(directory, replace(config, rope=replace(config.rope, theta=5e5)), "float32", "float32"),
        fingerprint(checkpoint("llama2", seed=1)),
    }
    assert len(variants) == 5


def test_a_fine_tune_of_any_one_tensor_changes_the_fingerprint(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3")
    seen = {fingerprint(directory)}
    names = list(expected_tensors(load_config(directory)))
    for name in names:
        edit(directory, lambda tensors, name=name: tensors[name].mul_(1.001))  # type: ignore[misc]
        seen.add(fingerprint(directory))
    assert len(seen) == len(names) + 1
