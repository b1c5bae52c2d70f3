"""Compiles and packs the FlashInfer kernels that the engine uses, so that a GPU machine need not compile them.

`nvcc` needs no GPU: `python -m scripts.gpu.kernels --arch 9.0a --out DIR`, with FlashInfer on the path. `carried.py`
unpacks the archive into FlashInfer's package.
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

import torch

from scripts.gpu.carried import archive_name
from scripts.gpu.common import MissingError, require
from scripts.gpu.toolchain import compile_environment


@dataclass(frozen=True, slots=True)
class Kernel:
    """One library of kernels.

    Attributes:
        label: Description.
        make: Returns FlashInfer's specification, which compiles and loads the library.
    """

    label: str
    make: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled library: its name in FlashInfer, the file, and the time to compile."""

    kernel: Kernel
    name: str
    path: Path
    seconds: float

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size


def used_kernels() -> list[Kernel]:
    """The kernels of `engine/ops/flashinfer_ops.py`, for the most common head sizes.

    Raises:
        MissingError: FlashInfer is not installed.
    """
    jit = require("flashinfer.jit", "flashinfer-python")

    def paged(dim: int) -> Kernel:
        dtype = torch.bfloat16
        arguments = ("fa2", dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, False)
        return Kernel(f"paged attention, bf16, head {dim}", lambda: jit.gen_batch_prefill_module(*arguments))

    return [paged(128), paged(64)]


def build(kernel: Kernel) -> Compiled:
    """Compiles a library unless it is compiled already."""
    spec = kernel.make()
    started = time.monotonic()
    spec.build(verbose=False)
    return Compiled(kernel, spec.name, spec.jit_library_path, time.monotonic() - started)


def pack(compiled: Sequence[Compiled], path: Path) -> None:
    """Writes the libraries into one archive for `carried.unpack_kernels`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for library in compiled:
            archive.add(library.path, f"{library.name}/{library.name}.so")


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles and packs the kernels; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.kernels", description=__doc__)
    parser.add_argument("--arch", default="9.0a", help="compute capability (default: 9.0a, an H100 or H200)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the archive")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="cpd-kernels-") as folder:
        # FlashInfer reads these when it is imported.
        os.environ.update(compile_environment(Path(folder, "lib")))
        os.environ.update(FLASHINFER_WORKSPACE_BASE=folder, FLASHINFER_CUDA_ARCH_LIST=args.arch)
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
