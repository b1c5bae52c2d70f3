from pathlib import Path

import pytest
import torch

from engine.memory import available_memory

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with 8 GiB of memory available."""
    (tmp_path / "meminfo").write_text(f"MemFree: 100 kB\nMemAvailable: {8 << 20} kB\n")
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    groups = tuple((tmp_path / f"v{version}", *files) for version, files in zip((2, 1), names, strict=True))
    monkeypatch.setattr("engine.memory._MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("engine.memory._CGROUPS", groups)
    return tmp_path


def test_what_the_system_has_where_there_is_no_container(system: Path) -> None:
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
def test_what_a_container_may_have_is_less_than_the_system_has(
    system: Path, folder: str, files: dict[str, int | str]
) -> None:
    (system / folder).mkdir()
    for name, content in files.items():
        (system / folder / name).write_text(f"{content}\n" if isinstance(content, int) else content)
    assert available_memory(CPU) == 3 << 30


def test_a_container_without_a_limit_may_have_what_the_system_has(system: Path) -> None:
    for name, content in {"memory.max": "max", "memory.current": "100", "memory.stat": "inactive_file 0"}.items():
        path = system / "v2" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{content}\n")
    assert available_memory(CPU) == 8 << 30


def test_a_system_that_tells_nothing(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available_memory(CPU) is None
