import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts.gpu import carry
from scripts.gpu.carried import _fits, arch_of, archive_name, unpack_kernels, unpack_wheels, wheels_for_this_python
from scripts.gpu.carry import LOADS, Load, command_line, pinned


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return path


def test_an_unpacked_wheel_can_be_imported(tmp_path: Path) -> None:
    wheel(
        tmp_path,
        "parcel-1.0-py3-none-any.whl",
        {
            "parcel/__init__.py": "from parcel.inner import VALUE",
            "parcel-1.0.data/purelib/parcel/inner.py": "VALUE = 7",
            "parcel-1.0.data/scripts/parcel": "#!/bin/sh",
            "parcel-1.0.dist-info/METADATA": "Name: parcel",
        },
    )
    unpack_wheels(wheels_for_this_python(tmp_path), tmp_path / "site")
    ran = subprocess.run(
        [sys.executable, "-c", "import parcel; print(parcel.VALUE)"],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.strip() == "7"
    assert not list((tmp_path / "site").glob("**/scripts"))


def test_a_member_that_leads_out_of_the_folder_is_left_out(tmp_path: Path) -> None:
    unpack_wheels(
        [wheel(tmp_path, "bad-1-py3-none-any.whl", {"../escaped.py": "", "/rooted.py": ""})], tmp_path / "site"
    )
    assert not (tmp_path / "escaped.py").exists()
    assert list((tmp_path / "site").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-1build-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-abi3-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp313-abi3-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_only_wheels_for_this_python_are_used(name: str, fits: bool) -> None:
    assert _fits(name, (3, 12)) is fits


def kernels(folder: Path, capability: str) -> Path:
    path = folder / archive_name("0.6.4", arch_of(capability))
    (folder / "k.so").write_text(capability)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder / "k.so", "attention/attention.so")
    return path


def test_kernels_for_this_device_go_where_flashinfer_looks_for_them(tmp_path: Path) -> None:
    archives = [kernels(tmp_path, "8.9"), kernels(tmp_path, "9.0")]
    assert [path.name for path in archives] == [
        "flashinfer-kernels-0.6.4-sm89.tar.gz",
        "flashinfer-kernels-0.6.4-sm90a.tar.gz",
    ]
    unpack_kernels(archives, "9.0", tmp_path / "site")
    assert not (tmp_path / "site").exists()  # no FlashInfer in this folder
    (tmp_path / "site" / "flashinfer").mkdir(parents=True)
    unpack_kernels(archives, "9.0", tmp_path / "site")
    library = tmp_path / "site" / "flashinfer" / "data" / "aot" / "attention" / "attention.so"
    assert library.read_text() == "9.0"


def test_versions_come_from_the_lock_file_unless_they_are_named() -> None:
    lock = "pydantic==2.14.3\npydantic_core==2.50.4\n"
    assert pinned(["pydantic", "pydantic-core", "tabulate", "a==1"], lock) == [
        "pydantic==2.14.3",
        "pydantic-core==2.50.4",
        "tabulate",
        "a==1",
    ]


def test_the_command_line_names_the_folders_the_commit_and_only_the_parts_that_need_it() -> None:
    assert command_line([LOADS["core"], LOADS["ray"]], "abc").startswith(
        "CPD_COMMIT=abc python3 -m scripts.gpu_check --carried .gpu .gpu-ray --out"
    )
    assert "--carried .gpu-ucx --only page_transfer --out" in command_line([LOADS["ucx"]], "abc")


def test_fetching_fills_a_folder_that_git_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[list[str]] = []
    monkeypatch.setattr(carry, "ROOT", tmp_path)

    def download(packages: list[str], folder: Path) -> None:
        downloads.append(packages)
        wheel(folder, "nixl-1-py3-none-any.whl", {"nixl/used.so": "0" * 9999, "nixl/perftest/large.so": ""})

    monkeypatch.setattr(carry, "download", download)
    (tmp_path / "requirements.lock").write_text("pydantic==2.0\n")
    load = Load(("nixl-cu13", "pydantic"), ".gpu-nixl", unused=("*/perftest/*",))
    for _ in range(2):
        carry.fetch(load)
    assert downloads == [["nixl-cu13", "pydantic==2.0"]] * 2
    folder = tmp_path / ".gpu-nixl"
    assert (folder / ".gitignore").read_text() == "*\n"
    assert {path.name for path in folder.iterdir()} == {".gitignore", "nixl-1-py3-none-any.whl"}
    with zipfile.ZipFile(folder / "nixl-1-py3-none-any.whl") as archive:
        assert archive.namelist() == ["nixl/used.so"]
        assert archive.getinfo("nixl/used.so").compress_size < 999


@pytest.mark.parametrize(("argv", "fetched"), [([], ["core"]), (["nixl", "ucx"], ["nixl", "ucx"])])
def test_without_a_name_the_core_is_fetched(
    argv: list[str], fetched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads: list[object] = []
    monkeypatch.setattr(carry, "fetch", loads.append)
    assert carry.main(argv) == 0
    assert loads == [LOADS[name] for name in fetched]
    printed = capsys.readouterr().out
    assert "--carried " + " ".join(LOADS[name].folder for name in fetched) in printed


def test_an_unknown_load_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        carry.main(["vllm"])
    assert "there is no load vllm" in capsys.readouterr().err
