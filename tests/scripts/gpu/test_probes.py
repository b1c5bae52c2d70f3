import ctypes
import re
from pathlib import Path

import pytest
import torch

from scripts.gpu import probes
from scripts.gpu.common import MissingError
from scripts.gpu.probes import PAGE_UNIT, SOURCE, Policy, ProbeError, Probes, compile_probes
from scripts.gpu.toolchain import cuda_root
from tests.scripts.gpu.fake_gpu import FakeGpu

needs_nvcc = pytest.mark.skipif(cuda_root() is None, reason="needs nvcc")


class FakeFunction:
    """A function of the compiled library."""

    def __init__(self, status: int | bytes) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.argtypes: list[type] = []
        self._status = status

    def __call__(self, *args: int) -> int | bytes:
        assert len(args) == len(self.argtypes)
        self.calls.append(args)
        return self._status


class FakeLibrary:
    """See `ctypes.CDLL`."""

    def __init__(self, status: int = 0) -> None:
        self.record_sms, self.compute, self.read_pages = (FakeFunction(status) for _ in range(3))
        self.error_text = FakeFunction(b"invalid argument")


def load(library: FakeLibrary) -> Probes:
    return Probes(library)  # type: ignore[arg-type]


def test_kernels_are_launched_on_the_current_stream(gpu: FakeGpu) -> None:
    library = FakeLibrary()
    launched = load(library)
    out, pool = torch.empty(512), torch.empty(3, PAGE_UNIT // 4, dtype=torch.int32)
    with gpu.on(gpu.stream_of(4242)):
        launched.record_sms(out, 100)
        launched.compute(out, out, 7)
        launched.read_pages(pool, out, out, Policy.STREAMING)
    pointer = out.data_ptr()
    assert library.record_sms.calls == [(pointer, 512, 100, 4242)]
    assert library.compute.calls == [(pointer, pointer, 2, 7, 4242)]
    assert library.read_pages.calls == [(pool.data_ptr(), pointer, pointer, 512, PAGE_UNIT // 16, 1, 4242)]


def test_a_launch_that_fails_says_why(gpu: FakeGpu) -> None:
    with pytest.raises(ProbeError, match="could not be launched: invalid argument"):
        load(FakeLibrary(1)).record_sms(torch.empty(1), 1)


def test_policies_and_the_page_unit_are_those_of_the_kernels() -> None:
    source = SOURCE.read_text()
    names = re.search(r"enum Policy \{ (.*) \};", source)
    assert names is not None
    assert names[1].split(", ") == [policy.name for policy in Policy]
    threads, loads = (int(n) for name in ("THREADS", "LOADS") for n in re.findall(rf"int {name} = (\d+);", source))
    assert threads == probes.BLOCK
    assert threads * loads * 16 == PAGE_UNIT


@needs_nvcc
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(compile_probes(tmp_path, "sm_90a")))
    Probes(library)
    assert b"invalid argument" in library.error_text(1)


@needs_nvcc
def test_a_compiler_error_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="sm_1"):
        compile_probes(tmp_path, "sm_1")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "cuda_root", lambda: None)
    with pytest.raises(MissingError, match="there is no nvcc; install the CUDA toolkit"):
        compile_probes(tmp_path, "sm_90")
