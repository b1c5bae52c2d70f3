"""Measures what a long prompt does to running streams on one combined worker's engine, without HTTP: mixed batches with
several token budgets, lanes, auto, all with one loaded model in one run.

Usage: `python -m scripts.bench_lanes [--model DIR] [--rounds N] [--json FILE] [--html FILE]`, from the repository's
root. Without `--model` it makes a checkpoint of 0.46 billion random weights first.
"""

import argparse
import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in production; torch reads it when it is loaded

import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.report.page import Chart, Page
from cpd.blocks import extend_hashes, hash_root
from cpd.perfmodel import PerfModel, Profile
from engine.colocation import Colocation, Mode
from engine.cpu_lanes import own_cores, use_threads
from engine.engine import Engine
from engine.profile.rough import time_a_few_steps
from engine.runner import TorchRunner
from engine.types import Request, SamplingParams
from models.tiny.make import write

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 16_384,
}
ROOT = hash_root(b"bench")
CONTEXT = 64
"""Prompt tokens of each stream."""


@dataclass
class Measured:
    """One way of colocation; in ms.

    Attributes:
        alone: Gaps between a stream's tokens with nothing else going on.
        beside: The same from the prompt's arrival until its first token.
        ttft: Of the prompts.
    """

    name: str
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)


class Bench:
    """Streams that decode, and prompts that come in between.

    Args:
        streams: How many decode.
        prompt: Tokens of the prompts.
    """

    def __init__(self, runner: TorchRunner, colocation: Colocation, name: str, streams: int, prompt: int) -> None:
        self.measured = Measured(name)
        self._engine = Engine(
            runner,
            max_model_len=runner.config.max_model_len,
            colocation=colocation,
            max_num_seqs=streams + 1,
            max_queue_tokens=1 << 20,
        )
        self._lane_done = threading.Event()
        self._engine.on_lane_done(self._lane_done.set)
        self._numbers = np.random.default_rng(0)
        self._vocab = runner.config.vocab_size
        self._prompt = prompt
        self._streams = streams
        self._added = 0

    def round(self, steps: int) -> None:
        """Starts the streams, has them alone for some steps, and then a prompt beside them."""
        streams = [self._add(CONTEXT, 1 << 20) for _ in range(self._streams)]
        waiting = set(streams)
        while waiting:
            waiting -= set(self._step())
        self.measured.alone += [self._timed_step() for _ in range(steps)]
        prompt, start = self._add(self._prompt, 1), time.perf_counter()
        done: list[str] = []
        last = start
        while prompt not in done:
            done = self._step()
            now = time.perf_counter()
            if streams[0] in done:
                self.measured.beside.append(1e3 * (now - last))
                last = now
        self.measured.ttft.append(1e3 * (now - start))
        for name in streams:
            self._engine.abort(name)

    def _add(self, length: int, max_tokens: int) -> str:
        self._added += 1
        tokens = self._numbers.integers(0, self._vocab, length).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        hashes = extend_hashes(ROOT, tokens)
        self._engine.add(Request(str(self._added), tokens, length, params, ROOT, hashes))
        return str(self._added)

    def _timed_step(self) -> float:
        start = time.perf_counter()
        self._step()
        return 1e3 * (time.perf_counter() - start)

    def _step(self) -> list[str]:
        """Who got a token."""
        if not self._engine.has_work:
            self._lane_done.wait()
        self._lane_done.clear()
        return [output.request_id for output in self._engine.step().outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint to measure with")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=int, default=20, help="steps a round without a prompt")
    parser.add_argument("--budgets", default="32,64,128,256,512,1024,2048", help="of mixed batches")
    parser.add_argument("--modes", default="lanes,auto")
    parser.add_argument("--profile", type=Path, help="what `cpd profile` wrote; otherwise a few steps are timed")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--html", type=Path, help="draw the trade-off here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            print("making a checkpoint of 0.46 billion random weights", file=sys.stderr)
            write(Path(directory), **LARGE)
        use_threads(own_cores())
        runner = TorchRunner(
            options.model or Path(directory), dtype="auto", device="cpu", kv_bytes=2 << 30, max_model_len=0
        )
    profile = (
        Profile.load(options.profile)
        if options.profile
        else time_a_few_steps(runner, 4096, device="here", model="0.46 B")
    )
    model = PerfModel(profile)
    ways: list[tuple[str, Mode, int]] = [(f"mixed {size}", "mixed", int(size)) for size in options.budgets.split(",")]
    ways += [(mode, mode, 512) for mode in options.modes.split(",")]
    benches = [
        Bench(
            runner,
            Colocation(model, token_budget=budget, mode=mode, splits=runner.splits, itl_ms=50.0),
            name,
            options.streams,
            options.prompt,
        )
        for name, mode, budget in ways
    ]
    for number in range(options.rounds):
        for bench in benches:
            print(f"round {number + 1} of {options.rounds}: {bench.measured.name}", file=sys.stderr)
            bench.round(options.alone)
    report([bench.measured for bench in benches])
    if options.json:
        options.json.write_text(json.dumps([asdict(bench.measured) for bench in benches]) + "\n")
    if options.html:
        draw([bench.measured for bench in benches], options.html)


def report(results: list[Measured]) -> None:
    """The table. Ratios are to the undisturbed gap of all, and to mixed batches of 512 tokens."""
    alone = statistics.median([gap for result in results for gap in result.alone])
    base = next((result for result in results if result.name == "mixed 512"), results[0])
    print(f"\nundisturbed gap: {alone:.1f} ms; ratios in brackets: to that, and to {base.name}\n")
    print("| | undisturbed ms | ITL p50 ms | ITL p99 ms | TTFT ms |\n| --- | --- | --- | --- | --- |")
    for result in results:
        p50, p99 = np.quantile(result.beside, (0.5, 0.99)).tolist()
        ttft = statistics.median(result.ttft)
        p99_ratio = p99 / float(np.quantile(base.beside, 0.99))
        print(
            f"| {result.name} | {statistics.median(result.alone):.1f} | {p50:.1f} ({p50 / alone:.2f}) "
            f"| {p99:.1f} ({p99 / alone:.2f}, {p99_ratio:.3f}) "
            f"| {ttft:.0f} ({ttft / statistics.median(base.ttft):.2f}) |"
        )


def draw(results: list[Measured], path: Path) -> None:
    """The longest gaps of running streams over the prompt's wait: the nearer to the lower left the better."""
    alone = statistics.median([gap for result in results for gap in result.alone])
    ttft = {result.name: statistics.median(result.ttft) / 1e3 for result in results}
    traces: list[dict[str, Any]] = [
        {"mode": "lines", "name": "undisturbed", "x": [min(ttft.values()), max(ttft.values())], "y": [alone, alone]}
    ]
    for quantile, label in ((0.5, "p50"), (0.99, "p99")):
        for mixed, kind in ((True, "mixed"), (False, "lanes and auto")):
            shown = [result for result in results if result.name.startswith("mixed") is mixed]
            traces.append(
                {
                    "mode": "lines+markers+text" if mixed else "markers+text",
                    "name": f"{kind}, {label}",
                    "x": [ttft[result.name] for result in shown],
                    "y": [float(np.quantile(result.beside, quantile)) for result in shown],
                    "text": [result.name.removeprefix("mixed ") for result in shown],
                    "textposition": "top center",
                }
            )
    axes = {
        "xaxis": {"title": {"text": "TTFT of the prompt, s"}, "type": "log"},
        "yaxis": {"title": {"text": "gap between tokens, ms"}, "type": "log"},
    }
    page = Page(
        "A long prompt beside running streams", f"{len(results[0].ttft)} rounds; undisturbed gap {alone:.1f} ms"
    )
    page.add(Chart("What streams feel against what the prompt waits", traces, axes, height=520, wide=True))
    page.write(path)


if __name__ == "__main__":
    main()
