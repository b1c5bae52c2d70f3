"""Compiles the C++ sources in this folder and loads them.

The library is cached in the user's cache directory under a digest of the sources, torch, the compiler and the CPU. A
change in any of them compiles it anew, and machines can share a home directory.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from cpd.common.errors import CPDError

log = logging.getLogger(__name__)

_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-Wno-psabi"),
)


class KernelsUnavailableError(CPDError):
    """The kernels can't be compiled or loaded here."""


def load() -> None:
    """Makes `torch.ops.cpd` available; compiles it first (10 to 30 s) if it is not in the cache.

    Raises:
        KernelsUnavailableError: There is no compiler, or it fails.
    """
    library = build()
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelsUnavailableError(f"{library} can't be loaded: {error}") from None


def build() -> Path:
    """Returns the library, compiling it unless it is cached. Several processes may call this at once.

    Environment: CXX replaces the compiler `c++`, CXXFLAGS adds flags, XDG_CACHE_HOME moves the cache.

    Raises:
        KernelsUnavailableError: See `load`.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise KernelsUnavailableError("no C++ compiler found; install g++ or set CXX")
    source_dir = Path(__file__).parent
    torch_dir = Path(torch.__file__).parent
    command = [compiler, *_FLAGS, f"-isystem{torch_dir / 'include'}", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    library = _cache_dir() / f"{_digest(source_dir, command)}.so"
    if library.exists():
        return library
    log.info("compiling the CPU kernels, once on this machine; this takes half a minute")
    start = time.monotonic()
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            unfinished = Path(scratch, library.name)
            link = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
            _run([*command, str(source_dir / "ops.cpp"), *link, "-o", str(unfinished)])
            unfinished.replace(library)
    except OSError as error:
        raise KernelsUnavailableError(f"{library.parent} can't be written ({error}); set XDG_CACHE_HOME") from None
    log.info("compiled %s in %.0f s", library, time.monotonic() - start)
    return library


def _cache_dir() -> Path:
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise KernelsUnavailableError("this user has no home directory to compile into; set XDG_CACHE_HOME") from None
    return Path(home, "cpd", "kernels")


def _digest(source_dir: Path, command: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted((*source_dir.glob("*.h"), *source_dir.glob("*.cpp"))):
        digest.update(path.read_bytes())
    for part in (*command, torch.__version__, _run([command[0], "--version"]), _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _cpu() -> str:
    """Returns the CPU's features, which decide the meaning of -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # Of a template's many lines, the first error is the most helpful.
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise KernelsUnavailableError(f"{command[0]} failed: {reason}")
    return done.stdout
