"""Finds the CUDA toolkit for FlashInfer's compilation, also where it is installed in pieces.

FlashInfer expects the toolkit above the folder of `nvcc`, and links with -lcudart and -lcuda. That fails where `nvcc`
is a wrapper, or where the libraries come from Python wheels or the driver. So this module asks `nvcc` for the folder,
and links the libraries into a folder of its own. It uses only the standard library.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_LIBRARIES = ("libcudart", "libcuda")
_LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "lib64/stubs", "lib/stubs")
_SYSTEM_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")


def compile_environment(folder: Path) -> dict[str, str]:
    """Environment variables for processes that import FlashInfer; empty without `nvcc`.

    Args:
        folder: Folder for links to libraries.
    """
    root = cuda_root()
    if root is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in _LIBRARIES:
        _link(name, root, folder)
    return {"CUDA_HOME": str(root), "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}"}


def cuda_root() -> Path | None:
    """The toolkit's folder, with bin/nvcc and include; None without `nvcc`."""
    if (named := os.environ.get("CUDA_HOME")) and (Path(named) / "bin" / "nvcc").exists():
        return Path(named)
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return None
    asked = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, text=True, timeout=60
    )
    here = re.search(r"^#\$ _HERE_=(.+)$", asked.stderr, re.MULTILINE)
    return Path(here[1] if here else Path(nvcc).parent).parent


def _link(name: str, root: Path, links: Path) -> None:
    """Puts `name`.so into a folder: a link to the installed library, or a stub to link against."""
    link = links / f"{name}.so"
    if link.exists():
        return
    link.unlink(missing_ok=True)  # a stale link
    found = next(_candidates(name, root), None)
    if found is not None:
        link.symlink_to(found)
    elif name == "libcuda" and (compiler := shutil.which("cc") or shutil.which("gcc")):
        # Without a driver, kernels can still be compiled here and run elsewhere.
        subprocess.run(
            [compiler, "-shared", "-x", "c", os.devnull, f"-Wl,-soname,{name}.so.1", "-o", str(link)], check=True
        )


def _candidates(name: str, root: Path) -> Iterator[Path]:
    wheels = [folder for entry in sys.path for folder in Path(entry or ".").glob("nvidia/*/lib")]
    for folder in [*(root / part for part in _LIBRARY_FOLDERS), *wheels, *map(Path, _SYSTEM_FOLDERS)]:
        for file in (f"{name}.so", *(f"{name}.so.{major}" for major in (13, 12, 1))):
            if (folder / file).is_file():
                yield (folder / file).resolve()
