import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from cpd.common.errors import CheckpointError, CPDError
from cpd.common.settings import ClusterSettings
from deploy.model import check_model, check_models, check_popular, inspect_model, resolve_model
from models.tiny import CHECKPOINT


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


def test_a_directory_is_used_as_it_is(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert resolve_model("model") == checkpoint
    check_model(checkpoint, ClusterSettings.load({}))


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nothing", "a/b/c", "~/nothing-here"])
def test_a_missing_path_is_not_taken_for_a_model_id(model: str) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint directory"):
        resolve_model(model)


def test_a_name_that_is_neither_path_nor_id_is_refused() -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor the id"):
        resolve_model("what is this?")


def test_a_model_that_cannot_be_downloaded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="no directory cpd/not-there, and the Hugging Face model"):
        resolve_model("cpd/not-there")


def test_weights_in_the_formats_of_their_makers_are_not_downloaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    others = ["consolidated.safetensors", "original/model.safetensors", "original/params.json", "pytorch_model.bin"]
    downloaded: list[str] = []

    def download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for file in (*files, *others):
            allowed, ignored = (
                any(fnmatch(file, pattern) for pattern in each) for each in (allow_patterns, ignore_patterns)
            )
            downloaded.extend([file] if allowed and not ignored else [])
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("mistralai/some-model") == checkpoint
    assert downloaded == files


def inspect(checkpoint: Path, **settings: Any) -> str:
    loaded = ClusterSettings.load(settings)
    return inspect_model(checkpoint, loaded, loaded.combined + loaded.prefill, 0)[0]


def test_broken_checkpoints_are_named_in_one_sentence(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated") as caught:
        check_model(checkpoint, ClusterSettings.load({}))  # other tests call inspect_model here, which is faster
    assert "\n" not in str(caught.value)

    weights.write_bytes(content)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_size": 512}))
    with pytest.raises(CPDError, match="shape"):
        inspect(checkpoint)

    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(CPDError, match=r"tokenizer\.json can't be read"):
        inspect(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CPDError, match=r"no tokenizer\.json"):
        inspect(checkpoint)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_model_len": 999_999}, "over the checkpoint's limit"),
        ({"kv_memory": 1024}, "too small for this model"),
        ({"kv_memory": 1 << 60}, "lower --kv-memory"),
        ({"host_kv_memory": 1024}, "--host-kv-memory 1024 holds no page; give at least"),
        ({"device": "cuda"}, "use --device cpu"),
        (
            {"simulate": "instant", "host_kv_memory": 1 << 30},
            "--host-kv-memory: simulated workers have no pages to keep",
        ),
        ({"simulate": "instant", "kv_memory": 1024}, "too small for this model"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint_are_refused(
    checkpoint: Path, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CPDError, match=sentence):
        inspect(checkpoint, **settings)


def test_workers_of_one_machine_share_its_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.memory_limits.available_memory", lambda device: 10 << 30)
    inspect(checkpoint, device="cpu", kv_memory=4 << 30, prefill=1, combined=1)
    with pytest.raises(CPDError, match="for each of 3 workers do not fit"):
        inspect(checkpoint, device="cpu", kv_memory=4 << 30, prefill=1, combined=2)
    inspect(checkpoint, device="cpu", kv_memory=3 << 30, host_kv_memory=1 << 30, prefill=1, combined=1)
    with pytest.raises(CPDError, match=r"for each of 2 workers do not fit into the 4.0 GiB .* lower --host-kv-memory"):
        inspect(checkpoint, device="cpu", kv_memory=3 << 30, host_kv_memory=3 << 30, prefill=1, combined=1)


def test_the_workers_of_all_models_must_fit_together(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.memory_limits._left_in_system", lambda: 5 << 30)
    settings = ClusterSettings.load({"device": "cpu", "kv_memory": 2 << 30, "prefill": 0})
    device, taken = inspect_model(checkpoint, settings, 2, 0)
    assert (device, taken >> 30) == ("cpu", 2)
    inspect_model(checkpoint, settings, 2, taken)
    with pytest.raises(CPDError, match=r"do not fit into the 1\.0 GiB of free memory"):
        inspect_model(checkpoint, settings, 3, 2 * taken)


def test_a_model_that_cannot_be_served_is_named_among_several(checkpoint: Path, tmp_path: Path) -> None:
    models = [{"name": "good", "model": str(checkpoint)}, {"name": "bad", "model": str(tmp_path / "none")}]
    with pytest.raises(CheckpointError, match=r"^bad: there is no checkpoint directory"):
        check_models(ClusterSettings.load({"device": "cpu", "kv_memory": 1 << 26, "models": models}).each_model())


def test_workers_of_one_gpu_share_its_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10 << 30, 16 << 30))
    assert inspect(checkpoint, kv_memory=4 << 30, prefill=0, combined=4) == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with pytest.raises(
        CPDError, match=r"for each of 3 workers .* 10.0 GiB of free memory of GPU 3, which has 16.0 GiB"
    ):
        inspect(checkpoint, kv_memory=4 << 30, prefill=1, combined=4)
    assert inspect(checkpoint, gpu_memory=0.8, prefill=0, combined=4) == "cuda"
    monkeypatch.setattr("engine.execution.memory_limits._MAX_PAGES", 1 << 40)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (4 << 30, 16 << 30))
    with pytest.raises(CPDError, match=r"a KV pool of 2.2 GiB for each of 2 workers .* lower --gpu-memory"):
        inspect(checkpoint, prefill=0, combined=4)


def test_a_gpu_that_does_not_work_is_refused_in_one_sentence(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(device: object) -> None:
        raise torch.AcceleratorError("CUDA error: busy or unavailable\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", busy)
    with pytest.raises(CPDError, match="the GPU does not work: CUDA error: busy or unavailable; see"):
        inspect(checkpoint)


def test_gpu_workers_of_one_machine_share_its_host_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10 << 30, 16 << 30))
    monkeypatch.setattr("engine.execution.memory_limits._left_in_system", lambda: 8 << 30)
    inspect(checkpoint, kv_memory=4 << 30, host_kv_memory=4 << 30, prefill=1, combined=1)
    with pytest.raises(CPDError, match=r"for each of 2 workers do not fit into the 8.0 GiB"):
        inspect(checkpoint, kv_memory=4 << 30, host_kv_memory=5 << 30, prefill=1, combined=1)


def test_without_gpus_workers_are_on_the_cpu(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inspect(checkpoint) == check_model(checkpoint, ClusterSettings.load({})) == "cpu"


def test_the_memory_of_other_machines_is_not_checked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert inspect(checkpoint, device="cuda", kv_memory=1 << 60, ray_address="10.0.0.5:6379") == "cuda"
    assert inspect(checkpoint, ray_address="10.0.0.5:6379") == "auto"


def test_simulated_workers_need_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert check_model(checkpoint, ClusterSettings.load({"simulate": "instant", "device": "cuda"})) == "cpu"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1},
            "sliding_window must be a positive integer, not 0",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "supported are default, linear, dynamic, llama3 and yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor of RoPE scaling must be at least 1"),
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "supported are LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, "
            "Qwen3ForCausalLM, Qwen3MoeForCausalLM",
        ),
        (
            {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok 9 is over the number of experts, 8",
        ),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "tensor .*gate.weight is missing"),
    ],
)
def test_a_model_that_does_not_run_is_refused_in_one_sentence(
    checkpoint: Path, fields: dict[str, Any], sentence: str
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(CPDError, match=sentence) as caught:
        inspect(checkpoint)
    assert "\n" not in str(caught.value)


def shared(checkpoint: Path, **settings: Any) -> ClusterSettings:
    given = {"device": "cpu", "kv_memory": 1 << 30, "prefill": 0, "device_memory": 3 << 30, **settings}
    return ClusterSettings.load({"model": str(checkpoint), **given})


def test_a_model_that_can_never_be_awake_is_refused_with_the_figures(checkpoint: Path) -> None:
    settings = shared(checkpoint, device_memory=1 << 30)
    with pytest.raises(
        CPDError, match=r"could never be awake: weights of 0\.0. GiB and a KV pool of 1\.00 GiB .* which is 1\.00 GiB"
    ):
        inspect_model(checkpoint, settings, 1, 0)
    with pytest.raises(CPDError, match="could never be awake"):
        inspect_model(checkpoint, settings.model_copy(update={"ray_address": "auto"}), 1, 0)


def test_models_that_share_a_device_need_not_fit_together(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.memory_limits.available_memory", lambda device: 4 << 30)
    for _ in range(9):
        device, awake = inspect_model(checkpoint, shared(checkpoint, combined=3), 9, 0)
        assert (device, awake >> 30) == ("cpu", 1)
    with pytest.raises(CPDError, match=r"--device-memory and --staging-memory are 5\.0 GiB together, and 4\.0 GiB"):
        inspect_model(checkpoint, shared(checkpoint, staging_memory=2 << 30), 1, 0)
    with pytest.raises(CPDError, match="lower --host-kv-memory"):
        inspect_model(checkpoint, shared(checkpoint, host_kv_memory=2 << 30), 1, 0)


def test_a_shared_gpu_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10 << 30, 16 << 30))
    with pytest.raises(CPDError, match="--device-memory is for machines without GPUs so far"):
        inspect_model(checkpoint, shared(checkpoint, device="auto"), 1, 0)


@pytest.mark.parametrize(
    ("popular", "workers", "message"),
    [
        (("a",), 2, ""),
        (("a",), 3, r"b takes 1\.00 GiB while it is awake, and popular models \(a 3\.00 GiB\) leave 0\.00 GiB"),
        (("a", "b"), 1, ""),
        (("a", "b"), 3, r"popular models take 4\.00 GiB together \(a 3\.00 GiB, b 1\.00 GiB\)"),
    ],
)
def test_popular_models_must_leave_room_for_each_other_one(
    checkpoint: Path, popular: tuple[str, ...], workers: int, message: str
) -> None:
    awake = []
    for name, combined in (("a", workers), ("b", 1)):
        one = shared(checkpoint, combined=combined, fairness={"popular": name in popular})
        awake.append((one.model_copy(update={"served_model_name": name}), 1 << 30))
    if not message:
        check_popular(awake)
        return
    with pytest.raises(CPDError, match=message):
        check_popular(awake)
