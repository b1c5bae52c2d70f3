"""A real model whose memory is given back to the system, and got again."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from cpd.common.errors import CheckpointError, ConfigError
from cpd.performance.colocation import Colocation
from deploy.gguf_model import directory_of
from engine.engine import Engine
from engine.execution.cpu import model_memory, system_memory
from engine.execution.cpu.lanes import own_cores, use_threads
from engine.execution.cpu.model_memory import ModelMemory
from engine.execution.runner import TorchRunner
from engine.model.config import load_config
from engine.types import SamplingParams
from tests.conftest import MakeCheckpoint
from tests.engine.fakes import MODEL, drain
from tests.engine.test_engine_model import make_request
from tests.gguf_files import write_gguf

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_key_value_heads": 4}
"""About 16 million parameters."""


def make_runner(directory: Path, *, dtype: str = "float32", num_pages: int = 64, **settings: Any) -> TorchRunner:
    use_threads(own_cores())
    kv_bytes = num_pages * load_config(directory).page_bytes(dtype)  # type: ignore[arg-type]
    return TorchRunner(directory, dtype=dtype, device="cpu", kv_bytes=kv_bytes, max_model_len=300, **settings)


def answers(runner: TorchRunner) -> list[list[int]]:
    """What the model answers, from an empty cache."""
    engine = Engine(
        runner,
        max_model_len=300,
        colocation=Colocation(MODEL, token_budget=64),
        max_num_seqs=8,
        max_queue_tokens=10_000,
    )
    for i in range(3):
        engine.add(make_request(f"r{i}", list(range(5 + i, 60 + 7 * i)), SamplingParams(seed=i, max_tokens=20)))
    served = drain(engine)
    return [served.token_ids[f"r{i}", 0] for i in range(3)]


def resident() -> int:
    """Memory of the process's own."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def stays(memory: ModelMemory) -> None:
    """Leaves the source of the next `restore` as it is: the checkpoint."""


def stage(memory: ModelMemory) -> None:
    memory.stage()


Prepare = Callable[[ModelMemory], None]


def assert_same_afterwards(runner: TorchRunner, prepare: Prepare) -> None:
    """Moves the weights, then releases and restores the model twice."""
    before = answers(runner)
    memory = runner.model_memory()
    prepare(memory)
    for _ in range(2):
        memory.release()
        memory.restore()
        assert answers(runner) == before


@pytest.mark.parametrize("prepare", [stays, stage])
@pytest.mark.parametrize(
    ("family", "dtype", "overrides"),
    [
        ("llama3", "float32", {}),
        ("qwen2", "bfloat16", {}),
        ("qwen3", "float32", {}),
        ("qwen3", "float16", {}),  # torch's own operations, where the head is the embedding
        ("qwen2", "bfloat16", {"intermediate_size": 177}),  # one layer has rows that the kernels can't read
    ],
)
def test_the_model_answers_the_same_afterwards(
    checkpoint: MakeCheckpoint, prepare: Prepare, family: str, dtype: str, overrides: dict[str, int]
) -> None:
    assert_same_afterwards(make_runner(checkpoint(family, **overrides), dtype=dtype), prepare)


@pytest.mark.parametrize("prepare", [stays, stage])
@pytest.mark.parametrize(
    ("family", "quantization", "settings"),
    [
        ("qwen3", "int4", {"dtype": "bfloat16"}),  # its head is a quantised copy of the embedding
        ("qwen3_moe", "int8", {"kv_dtype": "int8"}),
    ],
)
def test_a_quantised_model_answers_the_same_afterwards(
    checkpoint: MakeCheckpoint, prepare: Prepare, family: str, quantization: str, settings: dict[str, Any]
) -> None:
    directory = checkpoint(family, intermediate_size=192, **({"moe_intermediate_size": 64} if "moe" in family else {}))
    assert_same_afterwards(make_runner(directory, quantization=quantization, **settings), prepare)


@pytest.mark.parametrize("prepare", [stays, stage])
def test_a_model_of_a_gguf_file_answers_the_same_afterwards(
    checkpoint: MakeCheckpoint, prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.gguf_model._home", lambda: tmp_path / "cache")
    original = checkpoint("llama3", hidden_size=256, intermediate_size=256)
    write_gguf(original, tmp_path / "m.gguf", {"attn_v": GGMLQuantizationType.Q6_K, "": GGMLQuantizationType.Q4_K})
    assert_same_afterwards(make_runner(directory_of(tmp_path / "m.gguf"), dtype="bfloat16"), prepare)


@pytest.mark.parametrize("prepare", [stays, stage])
def test_the_process_really_gives_the_memory_back(checkpoint: MakeCheckpoint, prepare: Prepare) -> None:
    runner = make_runner(checkpoint("llama3", **LARGE), num_pages=4096)
    memory = runner.model_memory()
    assert memory.num_bytes > 100 << 20
    before = answers(runner)
    prepare(memory)
    awake = resident()
    assert memory.resident_bytes() > 0.98 * memory.num_bytes
    memory.release()
    assert memory.resident_bytes() < 0.02 * memory.num_bytes
    assert awake - resident() > 0.95 * memory.num_bytes
    memory.restore()
    memory.populate_pool()
    assert memory.resident_bytes() > 0.98 * memory.num_bytes
    assert abs(resident() - awake) < 0.05 * memory.num_bytes
    assert answers(runner) == before


def test_the_weights_are_moved_into_one_memory(checkpoint: MakeCheckpoint) -> None:
    runner = make_runner(checkpoint("qwen3", **LARGE))
    before = [tensor.clone() for tensor in runner._model.weights()]
    memory = runner.model_memory()
    places = sorted({(tensor.data_ptr(), tensor.nbytes) for tensor in runner._model.weights()})
    first, (last, size) = places[0][0], places[-1]
    assert first % system_memory.HUGE_PAGE_BYTES == 0
    assert last + size - first <= memory.weight_bytes
    for content, tensor in zip(before, runner._model.weights(), strict=True):
        assert torch.equal(tensor, content)


def test_the_weights_are_where_they_were(checkpoint: MakeCheckpoint) -> None:
    runner = make_runner(checkpoint("qwen3"))
    memory = runner.model_memory()
    weights = [(tensor.data_ptr(), tensor.clone()) for tensor in runner._model.weights()]
    pool = runner.pool.data_ptr()
    memory.release()
    memory.restore()
    for (address, content), tensor in zip(weights, runner._model.weights(), strict=True):
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)
    assert runner.pool.data_ptr() == pool
    assert not runner.pool.any()


def test_a_staged_copy_is_shared_memory_and_not_the_process_s_own(checkpoint: MakeCheckpoint) -> None:
    runner = make_runner(checkpoint("llama3", **LARGE))
    memory = runner.model_memory()
    own, shared = resident(), psutil.Process().memory_info().shared
    memory.stage()
    memory.stage()
    assert memory.staged_bytes == memory.weight_bytes > 60 << 20
    assert resident() - own < 0.1 * memory.weight_bytes
    assert psutil.Process().memory_info().shared - shared > 0.9 * memory.weight_bytes
    memory.unstage()
    memory.unstage()
    assert memory.staged_bytes == 0
    assert psutil.Process().memory_info().shared - shared < 0.1 * memory.weight_bytes


def test_a_copy_is_staged_from_the_checkpoint_while_the_memory_is_away(checkpoint: MakeCheckpoint) -> None:
    runner = make_runner(checkpoint("llama3", **LARGE))
    memory = runner.model_memory()
    before = answers(runner)
    memory.release()
    memory.stage()
    assert memory.resident_bytes() < 0.05 * memory.num_bytes
    memory.restore()
    assert answers(runner) == before


def test_a_gpus_memory_can_not_be_shared(checkpoint: MakeCheckpoint) -> None:
    runner = make_runner(checkpoint("qwen3"))
    runner._device = torch.device("cuda")
    with pytest.raises(ConfigError, match="--device-memory"):
        runner.model_memory()


class TestFailures:
    """Nothing is held, and the next try may succeed."""

    @pytest.fixture
    def directory(self, checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
        return Path(shutil.copytree(checkpoint("llama3", **LARGE), tmp_path / "model"))

    @pytest.mark.parametrize("step", ["restore", "stage"])
    def test_a_checkpoint_that_vanished(self, directory: Path, tmp_path: Path, step: str) -> None:
        runner = make_runner(directory)
        memory = runner.model_memory()
        before = answers(runner)
        memory.release()
        directory.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="holds neither model"):
                getattr(memory, step)()
            assert memory.resident_bytes() < 0.02 * memory.num_bytes
            assert memory.staged_bytes == 0
        (tmp_path / "elsewhere").rename(directory)
        memory.restore()
        assert answers(runner) == before

    @pytest.mark.parametrize("step", ["restore", "stage"])
    def test_a_checkpoint_with_other_weights(self, directory: Path, step: str) -> None:
        runner = make_runner(directory)
        memory = runner.model_memory()
        memory.release()
        path = directory / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.3.mlp.down_proj.weight"][7, 11] += 1
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match="does not hold the weights that the worker started with"):
            getattr(memory, step)()
        assert memory.resident_bytes() < 0.02 * memory.num_bytes
        assert memory.staged_bytes == 0

    def test_a_damaged_staged_copy_is_dropped_and_the_checkpoint_read(self, directory: Path) -> None:
        runner = make_runner(directory)
        memory = runner.model_memory()
        before = answers(runner)
        memory.stage()
        memory.release()
        assert memory._staged is not None
        memory._staged[memory.weight_bytes // 2] ^= 1
        with pytest.raises(CheckpointError, match="staged copy of the weights is damaged"):
            memory.restore()
        assert memory.staged_bytes == 0
        assert memory.resident_bytes() < 0.02 * memory.num_bytes
        memory.restore()
        assert answers(runner) == before

    def test_too_little_memory(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        runner = make_runner(directory)
        memory = runner.model_memory()
        before = answers(runner)
        memory.release()
        with monkeypatch.context() as patch:
            patch.setattr(model_memory, "available_memory", lambda device: memory.num_bytes - 1)
            with pytest.raises(ConfigError, match=r"needs 0.1 GiB of memory, and 0.1 GiB are free"):
                memory.restore()
        with monkeypatch.context() as patch:
            patch.setattr(system_memory, "populate", out_of_memory)
            with pytest.raises(ConfigError, match="gave no memory for a staged copy: Cannot allocate memory"):
                memory.stage()
        assert memory.resident_bytes() < 0.02 * memory.num_bytes
        assert memory.staged_bytes == 0
        memory.restore()
        assert answers(runner) == before


def out_of_memory(memory: object) -> None:
    raise OSError(12, "Cannot allocate memory")
