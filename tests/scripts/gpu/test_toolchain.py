import os
import stat
from pathlib import Path

import pytest

from scripts.gpu.toolchain import compile_environment, cuda_root


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit whose `nvcc` is reached through a wrapper in another folder."""
    root = tmp_path / "toolkit"
    for folder in ("bin", "lib64"):
        (root / folder).mkdir(parents=True)
    (root / "lib64" / "libcudart.so.13").touch()
    (tmp_path / "path").mkdir()
    for nvcc in (root / "bin" / "nvcc", tmp_path / "path" / "nvcc"):
        nvcc.write_text(f'#!/bin/sh\necho "#\\$ _HERE_={root}/bin" >&2\n')
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    return root


def test_the_toolkit_is_found_through_a_wrapper(toolkit: Path) -> None:
    assert cuda_root() == toolkit


def test_cuda_home_decides_if_there_is_a_compiler_in_it(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert cuda_root() == toolkit
    other = toolkit.parent / "other"
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(other))
    assert cuda_root() == other


def test_libraries_that_the_linker_would_not_find_are_put_in_one_folder(toolkit: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    environment = compile_environment(links)
    assert environment == {"CUDA_HOME": str(toolkit), "FLASHINFER_EXTRA_LDFLAGS": f"-L{links}"}
    assert (links / "libcudart.so").resolve() == toolkit / "lib64" / "libcudart.so.13"
    assert (links / "libcuda.so").exists()  # the driver's library, or a stub
    assert compile_environment(links) == environment  # a second time changes nothing


def test_without_a_compiler_nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("scripts.gpu.toolchain.shutil.which", lambda _: None)
    assert compile_environment(tmp_path / "links") == {}
