"""Runs the GPU tests and experiments, and prints their figures beside the targets.

Usage: `python3 -m scripts.gpu_check [--carried DIR …] [--out DIR] [--only PART …] [--minutes N] [--dry-run]`, from the
repository's root on a machine with a CUDA GPU. It needs PyTorch and `nvcc`; other packages can be wheels in folders
(`python -m scripts.gpu.carry` fetches them). Every part runs in its own process with a time limit.

Writes to --out: `gpu_check.json` (device, versions, commit, all figures; `docs/performance/` keeps them),
`details.tar.gz` (logs and each part's own files), and FlashInfer's kernels if they were compiled.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu.carried import KERNELS, KERNELS_INSIDE, unpack_kernels, unpack_wheels, wheels_for_this_python
from scripts.gpu.parts import Outcome, Part, run_all
from scripts.gpu.results import TARGETS_FOR, Exit, Target, heading, number, text_table
from scripts.gpu.toolchain import compile_environment

ROOT = Path(__file__).parents[1]
COMPILE = "compile_time"
PATIENCE_S = 180.0
"""Time limit to import torch and find the device, on a machine that does so for the first time."""
_LOAD = """
import sys, torch, tvm_ffi  # torch loads the CUDA libraries that the kernels need
for path in sys.argv[1:]:
    tvm_ffi.load_module(path)
"""


def _experiment(name: str, seconds: float, about: str) -> Part:
    return Part(name, ("-m", "scripts.gpu.run", name), seconds, about)


def _tests(what: str, file: str, seconds: float, about: str) -> Part:
    """A test file in its own process, because nothing else in a process works after an illegal access.

    Overrides pyproject.toml's options, whose plugins may be missing here, and does not turn warnings into errors. The
    log names each test as it begins, shows where a slow one is, and what it printed even if it is stopped.
    """
    name = f"tests_{what}"
    options = ("-o", "addopts=--import-mode=importlib", "-o", "faulthandler_timeout=40", "-W", "default")
    report = ("-p", "no:cacheprovider", f"--junitxml={{results}}/{name}.xml")
    return Part(name, ("-m", "pytest", "-m", "gpu", f"tests/gpu/{file}", "-v", "-s", *options, *report), seconds, about)


PARTS = (
    _tests("ops", "test_cuda_ops.py", 120, "Do the kernels compute what torch does?"),
    _experiment("attention_layout", 90, "FlashInfer on the page layout"),
    _experiment("decode_floor", 120, "Decode steps against the bandwidth floor"),
    _tests("partitions", "test_greenctx.py", 45, "Can the SMs be divided?"),
    _experiment("partition", 60, "Do streams and graphs stay in their SMs?"),
    _tests("engine", "test_cuda_engine.py", 120, "Are the engine's tokens right, with graphs and lanes?"),
    _experiment("two_kernels", 110, "Green Contexts against one and two streams"),
    _experiment("serving", 330, "Conversations, with lanes and with mixed batches"),
    _experiment("interference", 240, "What bursts of prompts cost the streams beside them"),
    _experiment("transformers_batching", 150, "Throughput against Hugging Face transformers"),
    _experiment("mixed_regime", 120, "What a prefill chunk costs the decodes beside it"),
    _experiment("evict_first", 90, "Do evict-first loads help the GEMM beside them?"),
    _experiment("decode_kernels", 110, "Kernels that stream what decodes read against cuBLAS and FlashInfer"),
    _experiment("sanitizer", 240, "compute-sanitizer on the small GPU tests"),
    _tests("transfer", "test_cuda_transfer.py", 60, "Do pages cross between two processes?"),
    _tests("cluster", "test_cuda_cluster.py", 240, "Are the answers of workers that share a GPU right?"),
    _experiment("cluster", 330, "A whole cluster under Ray, over HTTP"),
    _experiment("page_transfer", 120, "NIXL, what CPD makes of it, and ucxx between two processes"),
    _experiment(COMPILE, 180, "Compiling FlashInfer's kernels"),
)
"""The most valuable parts come first, and parts without Green Contexts before those with them: a process that hangs in
the driver can't always be ended, and then keeps the device busy for all later parts."""


def selected(only: Sequence[str], kernels: bool) -> list[Part]:
    """The parts to run, in order.

    Args:
        only: Names of parts; empty for all.
        kernels: There are compiled kernels. Without them, compiling comes first, since most parts need them.
    """
    chosen = [part for part in PARTS if not only or part.name in only]
    if not kernels:
        chosen.sort(key=lambda part: part.name != COMPILE)
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check. Returns 0 if no part failed, also if figures miss their targets."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--carried", type=Path, nargs="+", default=[], help="folders of wheels and compiled kernels to use"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="folder for the results")
    parser.add_argument("--only", nargs="+", default=[], choices=[part.name for part in PARTS], help="parts to run")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all parts together (default: 9)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    args = parser.parse_args(argv)
    for folder in args.carried:
        if not folder.is_dir():
            parser.error(f"--carried: {folder} is no folder; `python -m scripts.gpu.carry` makes one")
    kernels = sorted(path for folder in args.carried for path in folder.glob(KERNELS))
    if args.dry_run:
        print(plan(selected(args.only, bool(kernels)), args.minutes, args.carried))
        return Exit.OK
    with tempfile.TemporaryDirectory(prefix="cpd-gpu-check-") as folder:
        return check(args, kernels, Path(folder))


def plan(chosen: Sequence[Part], minutes: float, carried: Sequence[Path]) -> str:
    """Describes the parts that would run."""
    files = sorted({path.name for folder in carried for path in folder.iterdir() if not path.name.startswith(".")})
    rows = [[part.name, f"{part.seconds:.0f} s", part.about, " ".join(part.command)] for part in chosen]
    return "\n".join(
        [
            f"carried: {', '.join(files) or 'nothing'}",
            f"at most {minutes:g} minutes in all; parts without time left are not run",
            text_table(("part", "limit", "about", "python"), rows),
        ]
    )


def check(args: argparse.Namespace, kernels: Sequence[Path], work: Path) -> int:
    """Runs the chosen parts and writes their results. See `main`."""
    started = time.monotonic()
    site = work / "site"
    wheels = [wheel for folder in args.carried for wheel in wheels_for_this_python(folder)]
    unpack_wheels(wheels, site)
    describe_checkout(site)
    environment = child_environment(site, work)
    device, error = find_device(environment)
    if device is None:
        print(error, file=sys.stderr)
        return Exit.NO_DEVICE
    unpack_kernels(kernels, device["capability"], site)
    chosen = selected(args.only, kernels_load(site, environment))
    print(f"{device['device']}, driver {device['driver']}, torch {device['packages'].get('torch')}, {device['commit']}")
    outcomes: list[Outcome] = []
    seconds = args.minutes * 60 - (time.monotonic() - started)
    try:
        for outcome in run_all(chosen, work, ROOT, environment, seconds):
            outcomes.append(outcome)
            print(f"{time.monotonic() - started:4.0f} s  {outcome.name}: {outcome.status}  {outcome.note}", flush=True)
            if outcome.name == COMPILE:
                unpack_kernels(sorted((work / "results").glob(KERNELS)), device["capability"], site)
            hand_in(args.out, work, device, outcomes)
    finally:
        hand_in(args.out, work, device, outcomes)  # also after an interruption
    print(f"\n{tables(outcomes, device['device'])}")
    return Exit.OK if all(outcome.status in ("ok", "missing", "not run") for outcome in outcomes) else Exit.FAILED


_SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # as workers run
    "TRITON_INTERPRET": "0",  # the tests turn the interpreter on where there is no `nvidia-smi`
    "HF_HUB_OFFLINE": "1",  # without a network, a look-up waits long
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Environment variables of every part."""


def child_environment(site: Path, work: Path) -> dict[str, str]:
    """Environment variables of the parts, with the paths of carried packages and the toolkit."""
    path = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **compile_environment(work / "lib"), "PYTHONPATH": path, **_SETTINGS}


def describe_checkout(site: Path) -> None:
    """Adds the metadata of this checkout, which is not installed, to `site`: routers ask for their version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = site / f"{project['name']}-{project['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")


def find_device(environment: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    """The `Environment` of the parts, or None and the reason."""
    try:
        ran = _python(["-m", "scripts.gpu.common"], environment)
    except subprocess.TimeoutExpired as error:
        return None, f"no CUDA device: it did not answer within {error.timeout:.0f} s"
    if ran.returncode != Exit.OK:
        return None, (ran.stderr.strip().splitlines() or ["no CUDA device"])[-1]
    return json.loads(ran.stdout.strip().splitlines()[-1]), ""


def kernels_load(site: Path, environment: Mapping[str, str]) -> bool:
    """True if there are compiled kernels and this machine can load them. Removes those it can't load."""
    folder = site / "flashinfer" / KERNELS_INSIDE
    libraries = [str(path) for path in folder.glob("*/*.so")]
    if not libraries:
        return False
    try:
        ran = _python(["-c", _LOAD, *libraries], environment)
        loaded, error = ran.returncode == 0, ran.stderr.strip() or "?"
    except subprocess.TimeoutExpired as late:
        loaded, error = False, f"nothing happened within {late.timeout:.0f} s"
    if not loaded:
        print(f"the carried kernels do not load here, and are compiled again: {error[-200:]}")
        shutil.rmtree(folder)
    return loaded


def _python(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs Python in the environment of a part. Raises `subprocess.TimeoutExpired` after `PATIENCE_S`."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=PATIENCE_S)


def hand_in(out: Path, work: Path, device: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Rewrites the files under --out. Called after every part, so that an interrupted run keeps its results."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "name": "gpu_check",
        "environment": device,
        "targets_for": TARGETS_FOR,
        "parts": [part.to_json() for part in outcomes],
    }
    (out / "gpu_check.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with tarfile.open(out / "details.tar.gz", "w:gz") as archive:
        for folder in ("logs", "results"):
            if (work / folder).is_dir():
                archive.add(
                    work / folder, folder, filter=lambda file: None if "flashinfer-kernels" in file.name else file
                )
    for kernels in (work / "results").glob(KERNELS):
        (out / kernels.name).write_bytes(kernels.read_bytes())


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def tables(outcomes: Sequence[Outcome], device: str) -> str:
    """Tables of every figure with a target, and of how the parts ended."""
    rows = []
    for outcome in outcomes:
        for figure in outcome.figures:
            if (target := figure["target"]) is not None:
                met = "yes" if figure["met"] else "NO"
                bound = str(Target(**target))
                rows.append([figure["name"], number(figure["value"]), figure["unit"], bound, met])
    ends = [[outcome.name, outcome.status, f"{outcome.seconds:.0f} s", outcome.note[:80]] for outcome in outcomes]
    figures = text_table(("figure", "value", "unit", "target", "met"), rows)
    return f"{heading(device)}\n\n{figures}\n\n{text_table(('part', 'ended', 'took', 'note'), ends)}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # the part that runs must not outlive this process
    sys.exit(main())
