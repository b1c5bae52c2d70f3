"""Compares `cpd sim` with the same cluster in real time: `python -m scripts.validate_simulator`.

A prefill worker and two combined workers, simulated by `cpd up --simulate`, serve a trace of short prompts with shared
prefixes and some long prompts, sent by `cpd bench run`. The simulator replays the trace in virtual time. Both use an
H200's profile slowed down by `--slower`, so that HTTP, Python and other processes matter little beside the steps.
Percentiles should agree within 10 %. On a busy machine they mean nothing: check that the client could keep up.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import orjson

from bench.result import Result, Stat
from cpd.performance.model import Profile, ShareProfile, StepCost, TransferProfile
from models.tiny import CHECKPOINT

CPD = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
REQUESTS_PER_S = 1.3
"""Rate of the trace with `--slower 10`; it is inversely proportional to `--slower`."""


def slowed(profile: Profile, factor: float) -> Profile:
    """The profile of a device that is slower by a factor."""

    def cost(one: StepCost) -> StepCost:
        times = {name: getattr(one, name) * factor for name in ("seq_ms", "context_ms", "pair_ms")}
        return one.model_copy(update={**times, "tokens_ms": tuple(ms * factor for ms in one.tokens_ms)})

    def share(one: ShareProfile) -> ShareProfile:
        return one.model_copy(update={"decode": cost(one.decode), "prefill": cost(one.prefill)})

    transfer = TransferProfile(
        fixed_ms=profile.transfer.fixed_ms * factor, bytes_per_ms=profile.transfer.bytes_per_ms / factor
    )
    return profile.model_copy(update={"shares": tuple(map(share, profile.shares)), "transfer": transfer})


def write_trace(path: Path, requests: int, per_s: float, seed: int = 5) -> None:
    """Writes a trace in Mooncake's format: an eighth are long prompts, the others begin with one of four blocks."""
    rng = np.random.default_rng(seed)
    at_ms, lines = 0.0, []
    for number in range(requests):
        at_ms += rng.exponential(1000 / per_s)
        long = rng.random() < 1 / 8
        length = int(rng.uniform(4000, 9000) if long else rng.uniform(570, 1400))
        blocks = [1_000 + 100 * number + block for block in range(-(-length // 512))]
        if not long:
            blocks[0] = int(rng.integers(4))
        line = {"timestamp": round(at_ms), "input_length": length, "output_length": int(rng.integers(10, 40))}
        lines.append(orjson.dumps({**line, "hash_ids": blocks}))
    path.write_bytes(b"\n".join(lines) + b"\n")


def write_model(path: Path) -> None:
    """Writes a checkpoint without weights in which every token has text, so that a client sees the gap of every token.

    With the bundled tokenizer one token in fifty is only a part of a character, and its text comes with the next token.
    """
    path.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, path)
    tokenizer = orjson.loads((CHECKPOINT / "tokenizer.json").read_bytes())
    special = [token | {"special": False} for token in tokenizer["added_tokens"]]
    changed = tokenizer | {"decoder": {"type": "Fuse"}, "added_tokens": special}
    (path / "tokenizer.json").write_bytes(orjson.dumps(changed))


def in_real_time(model: Path, profile: Path, trace: Path, result: Path, targets: list[str], port: int) -> Result:
    """Starts the cluster, sends the trace and stops the cluster."""
    url = f"http://127.0.0.1:{port}"
    command = [*CPD, "up", "--cluster", f"validate-{os.getpid()}", "--port", str(port), "--prefill", "1"]
    command += ["--combined", "2", "--model", str(model), "--simulate", str(profile), *targets]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as cluster:
        try:
            wait_until_ready(url)
            bench = ["bench", "run", "--url", url, "--workload", "trace", "--file", str(trace), "--endpoint"]
            bench += ["completions", "--tokenizer", str(CHECKPOINT), "--no-selftest", "--json", str(result)]
            subprocess.run([*CPD, *bench], stdout=subprocess.DEVNULL, check=False)
        finally:
            cluster.send_signal(signal.SIGINT)
    return Result.load(result)


def wait_until_ready(url: str, limit_s: float = 120.0) -> None:
    """Waits until the router is ready."""
    ends = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.5)


def in_virtual_time(profile: Path, trace: Path, result: Path, targets: list[str]) -> Result:
    """Simulates the same cluster and trace."""
    command = ["sim", "run", "--profile", str(profile), "--workers", "3", "--prefill-workers", "1", "--warmup", "0"]
    command += ["--workload", "trace", "--file", str(trace), "--duration", "100000", "--json", str(result), *targets]
    subprocess.run([*CPD, *command], stdout=subprocess.DEVNULL, check=True)
    return Result.load(result)


def compare(name: str, real: Stat, simulated: Stat) -> str:
    """A line of percentiles: real time, virtual time, difference."""
    parts = []
    for figure in ("p50", "p90", "p95", "p99"):
        there, here = getattr(real, figure), getattr(simulated, figure)
        parts.append(f"{figure} {there:8.1f} {here:8.1f} {here / there - 1:+6.1%}")
    return f"{name:5}" + "   ".join(parts)


def main() -> None:
    """Runs both and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="h200-qwen3-8b", help="a file or the name of a bundled profile")
    parser.add_argument("--slower", type=float, default=20.0, help="slow-down factor; larger for a busy machine")
    parser.add_argument("--requests", type=int, default=120, help="requests of the trace")
    parser.add_argument("--port", type=int, default=8940, help="port of the router")
    options = parser.parse_args()
    slower: float = options.slower
    targets = ["--slo-ttft", f"{2000 * slower:g}", "--slo-itl", f"{50 * slower:g}"]
    with tempfile.TemporaryDirectory() as directory:
        model, profile, trace = (Path(directory, name) for name in ("model", "slow.json", "trace.jsonl"))
        write_model(model)
        slowed(Profile.load(options.profile), slower).save(profile)
        write_trace(trace, options.requests, REQUESTS_PER_S * 10 / slower)
        simulated = in_virtual_time(profile, trace, Path(directory, "sim.json"), targets)
        real = in_real_time(model, profile, trace, Path(directory, "real.json"), targets, options.port)
    print("real time, virtual time (ms) and the difference")
    for name in ("ttft", "itl", "tpot", "e2e"):
        print(compare(name, getattr(real.summary, f"{name}_ms"), getattr(simulated.summary, f"{name}_ms")))
    if real.client.limited:
        print("the machine was too busy: the load generator could not keep up:", "; ".join(real.client.reasons))


if __name__ == "__main__":
    main()
