"""Fetches the packages `scripts.gpu_check` needs on a GPU machine without a package registry, into folders here.

Usage: `python -m scripts.gpu.carry [core] [nixl] [ucx]`, on a machine with a registry. `core` (the default) is
FlashInfer, with compiled kernels if there is an `nvcc` here, and the engine's imports. `nixl` and `ucx` are the
transports of `tests_transfer` and `page_transfer`, each in a folder of its own, because uploads may be limited.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu.toolchain import cuda_root

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
GLIBCS = (39, 35, 34, 31, 28, 27, 24, 17)
MAX_MIB = 59
"""Largest size of a folder, so that an upload of this checkout with it stays below 64 MiB."""

FLASHINFER = ("flashinfer-python==0.6.4", "apache-tvm-ffi==0.1.15.post2", "tabulate")
FLASHINFER_HERE = ("filelock", "packaging", "requests", "einops", "click", "tqdm", "nvidia-ml-py")
"""Further imports of FlashInfer, to compile its kernels here. GPU machines with PyTorch have them."""
ENGINE = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
SETTINGS = ("pydantic-settings", "python-dotenv")
"""Further imports of `cpd bench transfer`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Packages for one folder, and the parts of `gpu_check` that need it (empty: all)."""

    packages: tuple[str, ...]
    folder: str
    parts: tuple[str, ...] = ()


LOADS: Mapping[str, Load] = {
    "core": Load((*FLASHINFER, *ENGINE), ".gpu"),
    "nixl": Load(("nixl-cu13", *ENGINE, *SETTINGS), ".gpu-nixl", ("tests_transfer", "page_transfer")),
    "ucx": Load(
        ("ucxx-cu13", "libucxx-cu13", "libucx-cu13==1.21.*", "rmm-cu13", "librmm-cu13", "rapids-logger"),
        ".gpu-ucx",
        ("page_transfer",),
    ),
}


def pinned(packages: Sequence[str], lock: str) -> list[str]:
    """Adds the versions of a lock file to packages that name none."""
    locked = dict(line.replace("_", "-").split("==", 1) for line in lock.split() if "==" in line)
    return [f"{name}=={locked[name]}" if name in locked else name for name in packages]


def download(packages: Sequence[str], folder: Path) -> None:
    """Downloads wheels for the GPU machine's Python, without their dependencies."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBCS] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    command += [f"--platform={platform}" for platform in platforms]
    subprocess.run([*command, "--dest", str(folder), *packages], check=True)


def compile_kernels(folder: Path) -> None:
    """Compiles FlashInfer's kernels with a temporary installation for this Python."""
    with tempfile.TemporaryDirectory(prefix="cpd-flashinfer-") as site:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
        subprocess.run([*install, *FLASHINFER, *FLASHINFER_HERE], check=True)
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "scripts.gpu.kernels", "--out", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})


def fetch(load: Load) -> None:
    """Fills a load's folder. Keeps what is there, so that a second call takes no time."""
    folder = ROOT / load.folder
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    download(pinned(load.packages, (ROOT / "requirements.lock").read_text()), folder)
    if load is LOADS["core"] and not list(folder.glob("flashinfer-kernels-*")):
        if cuda_root() is None:
            print("no nvcc here: FlashInfer's kernels will be compiled on the GPU machine, in a minute or two")
        else:
            compile_kernels(folder)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"{load.folder}: {size:.1f} MiB" + (f", over {MAX_MIB}" if size > MAX_MIB else ""))


def command_line(load: Load, commit: str) -> str:
    """The command to run on the GPU machine, in a copy of this checkout with the load's folder."""
    only = f" --only {' '.join(load.parts)}" if load.parts else ""
    return f'CPD_COMMIT={commit} python3 -m scripts.gpu_check --carried {load.folder}{only} --out "${{OUT:-out}}"'


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches the loads named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.carry", description=__doc__)
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"{', '.join(LOADS)} (default: core)")
    loads = parser.parse_args(argv).loads or ["core"]
    if unknown := set(loads) - set(LOADS):
        parser.error(f"there is no load {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}")
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = head.stdout.strip() or "unknown"
    for name in loads:
        fetch(LOADS[name])
    print("\nCopy this checkout with the folder to the GPU machine, and run there:")
    for name in loads:
        print(f"  {command_line(LOADS[name], commit)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
