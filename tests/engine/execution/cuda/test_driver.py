"""Calls of the driver, with the real package's types and signatures and a fake library."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.execution.cuda import driver as module
from engine.execution.cuda.driver import CudaDriver, CudaError, CudaUnavailableError, SmResource

bindings = pytest.importorskip("cuda.bindings.driver")


class Library:
    """A fake `cuda.bindings.driver`. It rejects calls with more or fewer arguments than the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.answers: dict[str, Any] = {"cuInit": (), **answers}
        for name in self.answers:
            monkeypatch.setattr(bindings, name, self._stand_in(name, argument_count(getattr(bindings, name))))

    def _stand_in(self, name: str, count: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            assert len(args) == count, f"{name} takes {count} arguments"
            self.calls[name] = args
            answer = self.answers[name]
            if isinstance(answer, bindings.CUresult):
                return (answer,)
            return (bindings.CUresult.CUDA_SUCCESS, *answer)

        return call


def argument_count(function: Any) -> int:
    """Counts the parameters of a compiled function, whose docstring begins with its signature."""
    inside = function.__doc__.split("\n", 1)[0].split("(", 1)[1].rsplit(")", 1)[0]
    while (shorter := re.sub(r"\[[^][]*\]", "", inside)) != inside:
        inside = shorter
    return len([argument for argument in inside.split(",") if argument.strip()])


def resource(sms: int, minimum: int = 8, step: int = 8) -> Any:
    made = bindings.CUdevResource()
    made.sm.smCount, made.sm.minSmPartitionSize, made.sm.smCoscheduledAlignment = sms, minimum, step
    return made


def test_the_devices_sms_and_their_granularity_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch, cuDeviceGet=[0], cuDeviceGetDevResource=[resource(132)], cuDeviceGetAttribute=[9])
    driver = CudaDriver()
    got = driver.sm_resource(0)
    assert (got.sms, got.minimum, got.step) == (132, 8, 8)
    assert library.calls["cuDeviceGetDevResource"] == (0, bindings.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    assert driver.compute_capability(0) == (9, 9)


def test_a_split_returns_the_part_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(monkeypatch, cuDevSmResourceSplitByCount=([resource(16)], 1, resource(116)))
    whole = resource(132)
    taken, rest = CudaDriver().split(SmResource(whole, 132, 8, 8), 16)
    assert (taken.sms, rest.sms) == (16, 116)
    assert library.calls["cuDevSmResourceSplitByCount"] == (1, whole, 0, 16)


def test_a_split_into_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Library(monkeypatch, cuDevSmResourceSplitByCount=([resource(0)], 0, resource(132)))
    with pytest.raises(CudaError, match="INVALID_RESOURCE_CONFIGURATION"):
        CudaDriver().split(SmResource(resource(132), 132, 8, 8), 16)


def test_a_context_and_its_stream_are_created_and_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(
        monkeypatch,
        cuDeviceGet=[0],
        cuDevResourceGenerateDesc=["description"],
        cuGreenCtxCreate=["context"],
        cuGreenCtxStreamCreate=[bindings.CUstream(4242)],
        cuStreamSynchronize=[],
        cuStreamDestroy=[],
        cuGreenCtxDestroy=[],
    )
    driver = CudaDriver()
    sms = resource(16)
    assert driver.create_context(0, SmResource(sms, 16, 8, 8)) == "context"
    assert library.calls["cuDevResourceGenerateDesc"] == ([sms], 1)
    assert library.calls["cuGreenCtxCreate"] == ("description", 0, 1)
    assert driver.create_stream("context") == 4242
    assert library.calls["cuGreenCtxStreamCreate"] == ("context", 1, 0)
    driver.synchronize(4242)
    driver.destroy_stream(4242)
    driver.destroy_context("context")
    assert int(library.calls["cuStreamSynchronize"][0]) == int(library.calls["cuStreamDestroy"][0]) == 4242


def test_clusters_are_checked_on_the_streams_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(
        monkeypatch,
        cuLibraryLoadData=[bindings.CUlibrary(7)],
        cuLibraryGetKernel=[bindings.CUkernel(8)],
        cuOccupancyMaxActiveClusters=[3],
        cuLibraryUnload=[],
    )
    assert CudaDriver().max_clusters(4242, 8) == 3
    kernel, launch = library.calls["cuOccupancyMaxActiveClusters"]
    assert isinstance(kernel, bindings.CUfunction)
    assert int(kernel) == 8
    assert (int(launch.hStream), launch.blockDimX, launch.numAttrs) == (4242, 1024, 1)
    assert launch.attrs[0].value.clusterDim.x == 8
    assert library.calls["cuLibraryUnload"]


def test_the_probe_is_unloaded_if_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(
        monkeypatch,
        cuLibraryLoadData=[bindings.CUlibrary(7)],
        cuLibraryGetKernel=[bindings.CUkernel(8)],
        cuOccupancyMaxActiveClusters=bindings.CUresult.CUDA_ERROR_INVALID_VALUE,
        cuLibraryUnload=[],
    )
    with pytest.raises(CudaError, match="cuOccupancyMaxActiveClusters failed with CUDA_ERROR_INVALID_VALUE"):
        CudaDriver().max_clusters(4242, 8)
    assert library.calls["cuLibraryUnload"]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", "lower --kv-memory"),
        ("CUDA_ERROR_NOT_SUPPORTED", "use --colocate mixed"),
        ("CUDA_ERROR_INVALID_VALUE", "use --colocate mixed"),
    ],
)
def test_a_failure_names_call_code_and_remedy(monkeypatch: pytest.MonkeyPatch, code: str, advice: str) -> None:
    Library(monkeypatch, cuGreenCtxDestroy=getattr(bindings.CUresult, code))
    with pytest.raises(CudaError, match=f"cuGreenCtxDestroy failed with {code}: .*{advice}") as caught:
        CudaDriver().destroy_context("context")
    assert (caught.value.call, caught.value.code) == ("cuGreenCtxDestroy", code)


def test_a_driver_without_a_call_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    Library(monkeypatch)
    driver = CudaDriver()
    monkeypatch.delattr(bindings, "cuGreenCtxDestroy")
    with pytest.raises(CudaUnavailableError, match=r"cuGreenCtxDestroy is missing .*: update the NVIDIA driver"):
        driver.destroy_context("context")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CudaUnavailableError, match="install CPD with its extra `gpu`"):
        CudaDriver()


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs CUDA's ptxas")
def test_the_probe_is_valid_ptx(tmp_path: Path) -> None:
    source = tmp_path / "probe.ptx"
    source.write_bytes(module._PROBE)
    subprocess.run(["ptxas", "-arch=sm_90a", str(source), "-o", str(tmp_path / "probe.cubin")], check=True)
