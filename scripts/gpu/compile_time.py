"""How long do FlashInfer's kernels take to compile here, and how large are they?

Compiles the engine's kernels (`scripts.gpu.kernels`) from scratch, one library at a time with all cores, and loads
them. The archive it writes under --out saves the next machine of this kind from compiling.
"""

import os
import tempfile
import time
from pathlib import Path

from scripts.gpu.carried import arch_of, archive_name
from scripts.gpu.common import require
from scripts.gpu.kernels import build, pack, used_kernels
from scripts.gpu.results import Report, Target
from scripts.gpu.toolchain import compile_environment

MAX_SECONDS = Target(at_most=180)
"""A longer time would leave too little of a ten-minute run."""
MAX_MIB = Target(at_most=16)
"""A larger archive is impractical to copy to every machine."""


def run(report: Report) -> None:
    """Runs the experiment."""
    with tempfile.TemporaryDirectory(prefix="cpd-compile-") as folder:
        # FlashInfer reads these when it is imported.
        os.environ.update(compile_environment(Path(folder, "lib")), FLASHINFER_WORKSPACE_BASE=folder)
        version = require("flashinfer", "flashinfer-python").__version__
        compiled = []
        for kernel in used_kernels():
            library = build(kernel)
            compiled.append(library)
            note = f"{library.bytes / 2**20:.2f} MiB; {os.cpu_count()} cores"
            report.add(f"compile: {kernel.label}", library.seconds, "s", note=note)
        started = time.monotonic()
        for library in compiled:
            library.kernel.make().load(library.path)
        report.add("load all, compiled before", (time.monotonic() - started) * 1e3, "ms")
        report.add("compile: all", sum(library.seconds for library in compiled), "s", target=MAX_SECONDS)
        path = Path(folder, archive_name(version, arch_of(report.environment.capability)))
        pack(compiled, path)
        report.add("kept cache, packed", path.stat().st_size / 2**20, "MiB", target=MAX_MIB)
        if report.out is not None:
            (report.out / path.name).write_bytes(path.read_bytes())
