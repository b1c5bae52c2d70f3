"""Compiles the kernels of `probes.cu` with `nvcc`, and launches them."""

import ctypes
import subprocess
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import Self

import torch

from scripts.gpu.common import MissingError
from scripts.gpu.toolchain import cuda_root

SOURCE = Path(__file__).with_name("probes.cu")
BLOCK = 256
"""Threads of a block, except in `record_sms`."""
PAGE_UNIT = 32 * 1024
"""The page size of `read_pages` must be a multiple of this, in bytes."""


class Policy(IntEnum):
    """Cache policy of the loads of `read_pages`; see `probes.cu`."""

    PLAIN = 0
    STREAMING = 1
    EVICT_FIRST = 2


class ProbeError(Exception):
    """A kernel could not be compiled or launched."""


class Probes:
    """Launches the kernels of a compiled `probes.cu` on torch's current stream."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        library.record_sms.argtypes = [pointer, integer, ctypes.c_longlong, pointer]
        library.compute.argtypes = [pointer, pointer, integer, integer, pointer]
        library.read_pages.argtypes = [pointer, pointer, pointer, integer, integer, integer, pointer]
        library.error_text.argtypes = [integer]
        library.error_text.restype = ctypes.c_char_p
        self._library = library

    @classmethod
    def build(cls, device: torch.device) -> Self:
        """Compiles the kernels for a device, in a few seconds. Raises as `compile_probes`."""
        major, minor = torch.cuda.get_device_capability(device)
        with tempfile.TemporaryDirectory(prefix="cpd-probes-") as folder:
            return cls(ctypes.CDLL(str(compile_probes(Path(folder), f"sm_{major}{minor}"))))

    def record_sms(self, out: torch.Tensor, cycles: int) -> None:
        """Writes the SM that runs each block of 1,024 threads to `out` [blocks] int32. Each block runs for `cycles`."""
        self._check(self._library.record_sms(out.data_ptr(), len(out), cycles, _stream()))

    def compute(self, source: torch.Tensor, out: torch.Tensor, iterations: int) -> None:
        """Computes 16 x `iterations` operations per element. source, out: [blocks * BLOCK] float32"""
        blocks = len(out) // BLOCK
        self._check(self._library.compute(source.data_ptr(), out.data_ptr(), blocks, iterations, _stream()))

    def read_pages(self, pool: torch.Tensor, table: torch.Tensor, out: torch.Tensor, policy: Policy) -> None:
        """Adds up the words of each page in 32 bits.

        Args:
            pool: [pages, words] int32, contiguous; the page size is a multiple of `PAGE_UNIT`.
            table: [n] int32, the pages to read.
            out: [n] int32, the sums.
            policy: Cache policy of the loads.
        """
        vectors = pool.shape[1] * pool.element_size() // 16
        addresses = (pool.data_ptr(), table.data_ptr(), out.data_ptr())
        self._check(self._library.read_pages(*addresses, len(table), vectors, policy, _stream()))

    def _check(self, status: int) -> None:
        if status:
            raise ProbeError(f"a kernel could not be launched: {self._library.error_text(status).decode()}")


def compile_probes(folder: Path, arch: str) -> Path:
    """Compiles `probes.cu` into a shared library in `folder`, for an architecture such as sm_90.

    Raises:
        MissingError: There is no `nvcc`.
        ProbeError: `nvcc` failed; the message has its output.
    """
    root = cuda_root()
    if root is None:
        raise MissingError("there is no nvcc; install the CUDA toolkit, or set CUDA_HOME to where it is")
    library = folder / "libprobes.so"
    command = [str(root / "bin" / "nvcc"), "-O3", f"-arch={arch}", "-Xcompiler=-fPIC", "-shared", str(SOURCE)]
    ran = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    if ran.returncode:
        raise ProbeError(f"{' '.join(command)} failed:\n{ran.stderr}")
    return library


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
