"""Unpacks what a GPU machine without a package registry needs: wheels into a folder for PYTHONPATH, and FlashInfer's
compiled kernels into that package.

`carry.py` fetches them. This module uses only the standard library.
"""

import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

KERNELS = "flashinfer-kernels-*.tar.gz"
"""File names of archives of compiled kernels."""
KERNELS_INSIDE = Path("data", "aot")
"""Folder in FlashInfer's package where it looks for compiled kernels."""


def wheels_for_this_python(folder: Path) -> list[Path]:
    """The wheels in a folder that this Python version can import."""
    return [path for path in sorted(folder.glob("*.whl")) if _fits(path.name, sys.version_info[:2])]


def unpack_wheels(wheels: Sequence[Path], site: Path) -> None:
    """Unpacks wheels into `site`, a folder for PYTHONPATH, without their command line scripts."""
    site.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                target = _target(PurePosixPath(member.filename))
                if target is not None and not member.is_dir():
                    path = site / target
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(member))
                    path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)


def archive_name(flashinfer_version: str, arch: str) -> str:
    """File name of an archive of kernels; `arch` is such as 9.0a."""
    return KERNELS.replace("*", f"{flashinfer_version}-sm{arch.replace('.', '')}")


def arch_of(capability: str) -> str:
    """The architecture FlashInfer compiles for on a device of this compute capability; from 9.0 on it has a suffix."""
    return capability + "a" if int(capability.split(".")[0]) >= 9 else capability


def unpack_kernels(archives: Sequence[Path], capability: str, site: Path) -> None:
    """Unpacks the archives for this device into the FlashInfer in `site`.

    Args:
        archives: Archives of compiled kernels; those for other devices are ignored.
        capability: Compute capability of the device, such as 9.0.
        site: The folder of `unpack_wheels`. Does nothing if FlashInfer is not in it.
    """
    package, ending = site / "flashinfer", archive_name("", arch_of(capability)).removeprefix("flashinfer-kernels-")
    for path in archives:
        if package.is_dir() and path.name.endswith(ending):
            with tarfile.open(path) as archive:
                if hasattr(tarfile, "data_filter"):  # Python 3.11.4
                    archive.extraction_filter = tarfile.data_filter
                archive.extractall(package / KERNELS_INSIDE)


def _target(member: PurePosixPath) -> PurePosixPath | None:
    """Where to put a wheel's file; None to skip it. Files of a `.data` folder belong elsewhere."""
    if member.is_absolute() or ".." in member.parts:
        return None
    if not member.parts[0].endswith(".data"):
        return member
    return PurePosixPath(*member.parts[2:]) if member.parts[1] in ("purelib", "platlib") else None


def _fits(name: str, version: tuple[int, int]) -> bool:
    """True if the Python tag in a wheel's name allows this CPython version."""
    python, abi = name.removesuffix(".whl").split("-")[-3:-1]
    tags = python.split(".")
    if "py3" in tags or f"cp{version[0]}{version[1]}" in tags:
        return True
    return abi == "abi3" and any(
        tag.startswith("cp3") and tag[3:].isdigit() and int(tag[3:]) <= version[1] for tag in tags
    )
