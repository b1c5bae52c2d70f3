import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from scripts.gpu.parts import Outcome, Part
from scripts.gpu.results import Exit, Figure, Target
from scripts.gpu.run import find_experiment
from tests.scripts.gpu.test_results import ENVIRONMENT

DEVICE = {"device": "a device", "capability": "9.0", "driver": "580", "packages": {"torch": "2"}, "commit": "abc"}
ROOT = Path(gpu_check.__file__).parents[1]


def part(name: str, code: str) -> Part:
    return Part(name, ("-c", code), 60.0, "about")


RESULT = {
    "name": "good",
    "figures": [
        Figure("speed", 1.5, "ratio", target=Target(at_least=1.34)).to_json(),
        Figure("error", 0.5, "relative", target=Target(at_most=0.01)).to_json(),
        Figure("beside", 3.0, "ms").to_json(),
    ],
}
GOOD = f"import json, os; json.dump({RESULT!r}, open(os.environ['OUT'] + '/good.json', 'w'))"


@pytest.fixture
def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_device", lambda _: (DEVICE, ""))


def test_the_most_valuable_parts_come_first_and_compiling_before_them_if_nothing_is_carried() -> None:
    names = [part.name for part in gpu_check.PARTS]
    assert names[:2] == ["tests_ops", "attention_layout"]
    assert [part.name for part in gpu_check.selected([], kernels=True)] == names
    assert [part.name for part in gpu_check.selected([], kernels=False)] == ["compile_time", *names[:-1]]
    only = gpu_check.selected(["page_transfer", "tests_ops"], kernels=False)
    assert [part.name for part in only] == ["tests_ops", "page_transfer"]


def test_every_experiment_is_a_module_with_a_question() -> None:
    experiments = [part.name for part in gpu_check.PARTS if part.command[:2] == ("-m", "scripts.gpu.run")]
    assert len(experiments) == 14
    for name in experiments:
        question, run = find_experiment(name)
        assert question.endswith("?"), name
        assert callable(run)


@pytest.mark.usefixtures("pretend_device")
def test_a_run_hands_in_one_summary_and_one_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", (part("bad", "import sys; sys.exit('no memory')"), part("good", GOOD)))
    out = tmp_path / "out"
    assert gpu_check.main(["--out", str(out)]) == Exit.FAILED
    assert {path.name for path in out.iterdir()} == {"gpu_check.json", "details.tar.gz"}
    content = json.loads((out / "gpu_check.json").read_text())
    assert content["environment"] == DEVICE
    assert [(one["name"], one["status"], one["note"]) for one in content["parts"]] == [
        ("bad", "failed", "no memory"),
        ("good", "ok", ""),
    ]
    assert content["parts"][1]["result"] == RESULT
    with tarfile.open(out / "details.tar.gz") as archive:
        assert {"logs/bad.log", "logs/good.log", "results/good.json"} <= set(archive.getnames())
    printed = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["speed", "1.5", "ratio", "≥", "1.34", "yes"] for line in printed)
    assert any(line.split() == ["error", "0.5", "relative", "≤", "0.01", "NO"] for line in printed)
    assert not any("beside" in line for line in printed)
    assert printed[-1].startswith("good")
    assert any(line.startswith("on one a device; targets were set for one NVIDIA H200") for line in printed)


def test_parts_compile_their_kernels_in_any_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = gpu_check.child_environment(tmp_path / "site", tmp_path)
    assert environment["TRITON_INTERPRET"] == "0"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment["PYTHONPATH"] == f"{tmp_path}/site:{ROOT}:/elsewhere"


def test_every_gpu_test_has_a_part_of_its_own() -> None:
    run = {argument for part in gpu_check.PARTS for argument in part.command if argument.startswith("tests/")}
    assert run == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


@pytest.mark.usefixtures("pretend_device")
def test_what_a_part_found_before_the_check_was_ended_is_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(work: Path) -> Iterator[Outcome]:
        yield Outcome("first", "ok", 1.0)
        (work / "results").mkdir()
        (work / "results" / "second.json").write_text("{}")
        sys.exit(143)

    monkeypatch.setattr(gpu_check, "run_all", lambda chosen, work, *_: ended(work))
    with pytest.raises(SystemExit):
        gpu_check.main(["--out", str(tmp_path)])
    with tarfile.open(tmp_path / "details.tar.gz") as archive:
        assert "results/second.json" in archive.getnames()
    assert [one["name"] for one in json.loads((tmp_path / "gpu_check.json").read_text())["parts"]] == ["first"]


@pytest.mark.usefixtures("pretend_device")
def test_a_missing_package_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_check, "PARTS", (part("m", f"import sys; sys.exit({int(Exit.MISSING)})"), part("good", GOOD))
    )
    assert gpu_check.main(["--out", str(tmp_path)]) == Exit.OK


@pytest.mark.usefixtures("pretend_device")
def test_kernels_that_were_compiled_serve_the_parts_after_and_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "flashinfer-kernels-0.6.4-sm90a.tar.gz"
    with tarfile.open(tmp_path / name, "w:gz") as archive:
        info = tarfile.TarInfo("attention/attention.so")
        archive.addfile(info, io.BytesIO())
    carried = tmp_path / "carried"
    carried.mkdir()
    monkeypatch.setattr(
        gpu_check, "unpack_wheels", lambda wheels, site: (site / "flashinfer").mkdir(parents=True, exist_ok=True)
    )
    compiles = f"import os, shutil; shutil.copy({str(tmp_path / name)!r}, os.environ['OUT'])"
    uses = (
        "import os, pathlib; site = pathlib.Path(os.environ['PYTHONPATH'].split(os.pathsep)[0]);"
        "assert (site / 'flashinfer/data/aot/attention/attention.so').exists()"
    )
    monkeypatch.setattr(gpu_check, "PARTS", (part("uses", uses), part("compile_time", compiles)))
    assert gpu_check.main(["--carried", str(carried), "--out", str(tmp_path / "out")]) == Exit.OK
    assert (tmp_path / "out" / name).exists()


def test_a_checkout_that_is_not_installed_knows_its_version(tmp_path: Path) -> None:
    gpu_check.describe_checkout(tmp_path)
    [found] = distributions(name="cpd", path=[str(tmp_path)])
    assert found.version == version("cpd")


def test_carried_kernels_that_do_not_load_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "flashinfer" / "data" / "aot"
    (folder / "attention").mkdir(parents=True)
    (folder / "attention" / "attention.so").write_text("for another machine")
    assert gpu_check.kernels_load(tmp_path, os.environ) is False
    assert not folder.exists()
    assert "are compiled again" in capsys.readouterr().out
    assert gpu_check.kernels_load(tmp_path, os.environ) is False


def test_a_machine_that_does_not_answer_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PATIENCE_S", 0.01)
    library = tmp_path / "flashinfer" / "data" / "aot" / "attention" / "attention.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert gpu_check.kernels_load(tmp_path, os.environ) is False
    assert not library.exists()
    device, error = gpu_check.find_device(os.environ)
    assert device is None
    assert "did not answer" in error


def test_a_dry_run_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry-run", "--only", "decode_floor"]) == Exit.OK
    printed = capsys.readouterr().out
    assert "decode_floor" in printed
    assert "scripts.gpu.run decode_floor" in printed
    assert "mixed_regime" not in printed


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--carried", "/nowhere"])
    assert "scripts.gpu.carry" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == Exit.NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_device_is_described_as_in_every_result() -> None:
    assert DEVICE.keys() <= set(ENVIRONMENT.__dataclass_fields__)


def test_the_table_survives_a_part_without_a_result() -> None:
    assert "timed out" in gpu_check.tables([Outcome("x", "timed out", 60.0, "stopped after 60 s")], "a device")
