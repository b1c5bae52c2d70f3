"""What does a whole cluster under Ray do on one GPU: how long does it start, what memory does it take, how fast is it?

`cpd up` runs on a checkpoint of Qwen3 4B's shape with random bfloat16 weights, once with a combined worker and once
with a prefill worker beside it on the same GPU. `cpd bench` loads it over HTTP; then the combined worker is killed.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.model.config import load_config
from engine.model.parameters import expected_tensors
from models.tiny import CHECKPOINT
from scripts.gpu.common import CPD, require
from scripts.gpu.models import MODELS
from scripts.gpu.random_model import RandomCheckpoint
from scripts.gpu.results import Report

MODEL = "Qwen3-4B"
PATIENCE_S = 150.0
LAYOUTS = {"combined": (0, 1), "prefill + combined": (1, 1)}
"""(prefill workers, combined workers) by name."""
LOADS: Mapping[str, tuple[str, ...]] = {
    "random 1,024 in, 128 out, x 32": (
        *("--input-len", "1024", "--output-len", "128"),
        *("--concurrency", "32", "--num-requests", "128"),
    ),
    "light conversations x 64": (
        *("--workload", "multi-turn", "--preset", "light", "--turns", "4"),
        *("--concurrency", "64", "--num-requests", "96"),
    ),
}


def write_checkpoint(directory: Path, fields: Mapping[str, object], device: str) -> int:
    """Writes a checkpoint with random weights and the tiny model's tokenizer. Returns the bytes of the weights.

    The output rows of tokens without text are zero, so that every answer has text to stream.
    """
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, directory)
    (directory / "config.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    written = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([token]) for token in range(written)]
    silent = [token for token, text in enumerate(texts) if not text or "\ufffd" in text]
    config, checkpoint = load_config(directory), RandomCheckpoint(directory)
    weights = {}
    for name in expected_tensors(config):
        tensor = checkpoint.read([name], torch.bfloat16, torch.device(device))
        if name == ("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"):
            tensor[written:], tensor[silent] = 0, 0
        weights[name] = tensor.cpu()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in weights.values())


def cpd(*arguments: str) -> str:
    """Runs a command of `cpd`. Prints its output, less what the router logs of every request, and returns it.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run([*CPD, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "router.access" not in line]
    print(f"$ cpd {' '.join(arguments)}", *lines, sep="\n", flush=True)
    if done.returncode:
        raise RuntimeError(f"cpd {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def used_gib() -> float:
    """Memory of the device that processes have taken, GiB."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def seconds_until(condition: Callable[[], bool]) -> float:
    """Waits until a condition is true. Returns the seconds.

    Raises:
        RuntimeError: It is still false after `PATIENCE_S`.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE_S:
            raise RuntimeError(f"not ready within {PATIENCE_S:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - began


def workers() -> list[dict[str, Any]]:
    """The workers of the running cluster, as `cpd status --json` shows them."""
    found: list[dict[str, Any]] = json.loads(cpd("status", "--json"))["workers"]
    return found


def measure(report: Report, device: str, fields: Mapping[str, object], *, kv_memory: str) -> None:
    """Measures both layouts on a model with these config.json fields."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        weights = write_checkpoint(model, fields, device)
        for name, (prefill, combined) in LAYOUTS.items():
            idle = used_gib()
            flags = ("--device", device, "--model", str(model), "--dtype", "bfloat16", "--kv-memory", kv_memory)
            began = time.monotonic()
            cpd("up", "--detach", "--prefill", str(prefill), "--combined", str(combined), *flags)
            try:
                report.add(f"{name}: started within", time.monotonic() - began, "s")
                layout(report, name, idle, weights, folder, model)
            finally:
                cpd("logs")
                cpd("down")
            report.add(f"{name}: GPU memory after `cpd down`", used_gib() - idle, "GiB")


def layout(report: Report, name: str, idle: float, weights: int, folder: str, model: Path) -> None:
    """Measures a running cluster."""
    found = workers()
    note = "; ".join(f"{worker['id']}: {worker['info']['device']}, {worker['info']['colocate']}" for worker in found)
    held = sum(weights + worker["info"]["num_pages"] * worker["info"]["page_bytes"] for worker in found) / 2**30
    beside = (used_gib() - idle - held) / len(found)
    report.add(f"{name}: GPU memory of a worker beside weights and pages", beside, "GiB", note=note)
    for load, flags in LOADS.items():
        file = Path(folder, "bench.json")
        cpd("bench", "run", "--tokenizer", str(model), "--no-selftest", "--json", str(file), *flags)
        summary = json.loads(file.read_text())["summary"]
        ttft, itl = summary["ttft_ms"], summary["itl_ms"]
        note = f"{summary['completed']} done, {summary['failed']} failed"
        report.add(f"{name}: {load}: throughput", summary["output_tokens_per_s"], "tokens/s", note=note)
        report.add(f"{name}: {load}: TTFT p50", ttft["p50"], "ms", note=f"p99 {ttft['p99']:.4g}")
        report.add(f"{name}: {load}: ITL p99", itl["p99"], "ms", note=f"p50 {itl['p50']:.4g}")
        for route in summary["by_route"]:
            figures = route["ttft_ms"]
            note = f"{route['completed']} requests, p99 {figures['p99']:.4g}"
            report.add(f"{name}: {load}: TTFT p50, route {route['name']}", figures["p50"], "ms", note=note)
    before = used_gib()
    (killed,) = (worker["pid"] for worker in found if worker["role"] == "combined")
    os.kill(killed, signal.SIGKILL)

    def again() -> bool:
        ready = [worker for worker in workers() if worker["state"] == "ready"]
        return len(ready) == len(found) and all(worker["pid"] != killed for worker in ready)

    report.add(f"{name}: serves again after `kill -9`", seconds_until(again), "s")
    report.add(f"{name}: GPU memory more than before `kill -9`", used_gib() - before, "GiB")


def run(report: Report) -> None:
    """Runs the experiment."""
    require("ray", "ray")
    require("nixl_cu13", "nixl-cu13")
    measure(report, "cuda", MODELS[MODEL], kv_memory="24GiB")
