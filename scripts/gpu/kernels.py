"""Compiles the FlashInfer kernels that this project uses, and packs them so that a GPU machine need not.

`nvcc` does that without a GPU: `python -m scripts.gpu.kernels --arch 9.0a --out DIR`, with FlashInfer on the path.
Unpacked into FlashInfer's package, they are found as if they had come with it (`scripts.gpu_check` does so).
"""

import argparse
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu.common import MissingError, require
from scripts.gpu.toolchain import compile_environment

INSIDE_FLASHINFER = Path("data", "aot")
"""Where FlashInfer looks for kernels that were compiled before, under its package."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One library of kernels.

    Attributes:
        label: What it is, for people.
        make: Gives FlashInfer's specification of it, which compiles and loads.
    """

    label: str
    make: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled library: its name in FlashInfer, the file, and how long it took."""

    kernel: Kernel
    name: str
    path: Path
    seconds: float

    @property
    def bytes(self) -> int:
        """Of the file."""
        return self.path.stat().st_size


def used_kernels() -> list[Kernel]:
    """What the engine's CUDA back end calls for the models it serves.

    Decode runs on the prefill kernels where a key-value head serves four query heads or more, as it does in all shapes
    that are measured; for fewer there are kernels without tensor cores. Both head sizes that common models have.

    Raises:
        MissingError: FlashInfer is not installed.
    """
    attention = require("flashinfer.jit", "flashinfer-python")
    torch = require("torch", "torch")

    def paged(dtype: Any, dim: int) -> Callable[[], Any]:
        arguments = (dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False)
        return lambda: attention.gen_batch_prefill_module("fa2", *arguments, False)

    def decode(dtype: Any, dim: int) -> Callable[[], Any]:
        return lambda: attention.gen_batch_decode_module(dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False)

    return [
        Kernel("paged attention, bf16, head 128", paged(torch.bfloat16, 128)),
        Kernel("paged attention, bf16, head 64", paged(torch.bfloat16, 64)),
        Kernel("decode without tensor cores, bf16, head 128", decode(torch.bfloat16, 128)),
    ]


def build(kernel: Kernel) -> Compiled:
    """Compiles a library, or finds it compiled."""
    spec = kernel.make()
    started = time.monotonic()
    spec.build(verbose=False)
    return Compiled(kernel, spec.name, spec.jit_library_path, time.monotonic() - started)


def pack(compiled: Sequence[Compiled], path: Path) -> None:
    """Writes the libraries into one archive, as `unpack` takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for library in compiled:
            archive.add(library.path, f"{library.name}/{library.name}.so")


def unpack(path: Path, flashinfer: Path) -> None:
    """Puts an archive's libraries where FlashInfer finds them.

    Args:
        flashinfer: The folder of the package.
    """
    with tarfile.open(path) as archive:
        archive.extractall(flashinfer / INSIDE_FLASHINFER, filter="data")


def arch_of(capability: str) -> str:
    """What FlashInfer compiles for on a device of that compute capability: from 9.0 on, for that one chip."""
    return capability + "a" if int(capability.split(".")[0]) >= 9 else capability


def archive_name(flashinfer_version: str, arch: str) -> str:
    """File name of an archive; `arch` as in 9.0a."""
    return f"flashinfer-kernels-{flashinfer_version}-sm{arch.replace('.', '')}.tar.gz"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.kernels", description=__doc__)
    parser.add_argument("--arch", default="9.0a", help="compute capability (default: 9.0a, an H100 or H200)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="cpd-kernels-") as folder:
        # FlashInfer reads these when it is imported.
        os.environ.update(compile_environment(Path(folder)), FLASHINFER_CUDA_ARCH_LIST=args.arch)
        if "CUDA_HOME" not in os.environ:
            print("there is no nvcc here; install the CUDA toolkit, or compile on the GPU machine", file=sys.stderr)
            return 1
        try:
            version = require("flashinfer", "flashinfer-python").__version__
            kernels = used_kernels()
        except MissingError as error:
            print(error, file=sys.stderr)
            return 1
        compiled = []
        for kernel in kernels:
            compiled.append(build(kernel))
            print(f"{kernel.label}: {compiled[-1].seconds:.0f} s, {compiled[-1].bytes / 2**20:.1f} MiB", flush=True)
        path = args.out / archive_name(version, args.arch)
        pack(compiled, path)
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
