from pathlib import Path

import pytest
import torch

from cpd.common.blocks import POOL_BYTES
from cpd.common.errors import ConfigError
from engine.execution.memory_limits import available_memory, default_pool

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
GIB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes a system with 8 GiB of available memory."""
    (tmp_path / "meminfo").write_text(f"MemFree: 100 kB\nMemAvailable: {8 << 20} kB\n")
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    groups = tuple((tmp_path / f"v{version}", *files) for version, files in zip((2, 1), names, strict=True))
    monkeypatch.setattr("engine.execution.memory_limits._MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("engine.execution.memory_limits._CGROUPS", groups)
    return tmp_path


def test_available_memory_without_a_container(system: Path) -> None:
    assert available_memory(CPU) == 8 << 30


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        ("v2", {"memory.max": 5 << 30, "memory.current": 3 << 30, "memory.stat": f"anon 7\ninactive_file {1 << 30}\n"}),
        (
            "v1",
            {
                "memory.limit_in_bytes": 5 << 30,
                "memory.usage_in_bytes": 3 << 30,
                "memory.stat": f"inactive_file 7\ntotal_inactive_file {1 << 30}\n",
            },
        ),
    ],
)
def test_available_memory_in_a_container_with_a_limit(system: Path, folder: str, files: dict[str, int | str]) -> None:
    (system / folder).mkdir()
    for name, content in files.items():
        (system / folder / name).write_text(f"{content}\n" if isinstance(content, int) else content)
    assert available_memory(CPU) == 3 << 30


def test_available_memory_in_a_container_without_a_limit(system: Path) -> None:
    for name, content in {"memory.max": "max", "memory.current": "100", "memory.stat": "inactive_file 0"}.items():
        path = system / "v2" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{content}\n")
    assert available_memory(CPU) == 8 << 30


def test_available_memory_is_unknown_without_proc(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available_memory(CPU) is None


def test_a_pool_gets_the_rest_of_the_gpus_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    assert default_pool(GPU, 16 * GIB, 1 << 20, 0.9) == 51 * GIB
    assert default_pool(GPU, 16 * GIB, 1 << 20, 0.45) == 15 * GIB
    assert default_pool(CPU, 16 * GIB, 1 << 20, 0.9) == POOL_BYTES
    with pytest.raises(ConfigError, match="raise --gpu-memory, start fewer workers"):
        default_pool(GPU, 35 * GIB, 1 << 20, 0.45)


def test_a_small_model_does_not_use_a_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    assert default_pool(GPU, 1 << 20, 16 << 10, 0.9) == 4 * GIB
