"""Measures how a long prompt slows down running streams on a combined worker's engine, without HTTP.

Compares mixed batches with several token budgets, lanes, and auto, with one loaded model in one run. It also compares
streams without a prompt under lanes and mixed batches, in alternating steps, so that all meet the same load of the
machine.

Usage: `python -m scripts.bench_lanes [--model DIR] [--rounds N] [--turns N] [--json FILE] [--html FILE]`, from the
repository's root. Without `--model` it first makes a checkpoint of 0.46 billion random weights.
"""

import argparse
import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in production; torch reads it when it is loaded

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.report.page import Chart, Page
from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel, Profile
from engine.execution.cpu.lanes import own_cores, use_threads
from engine.execution.runner import TorchRunner
from engine.profile.rough import measure_rough_profile
from models.tiny.make import write
from scripts.engine_driver import EngineDriver

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 16_384,
}
CONTEXT = 64
"""Prompt tokens of each stream."""


@dataclass
class Round:
    """One prompt beside running streams; times in ms.

    Attributes:
        alone: Gaps between a stream's tokens before the prompt, and after its first token.
        beside: Gaps between a stream's tokens from the prompt's arrival to its first token.
        ttft: TTFT of the prompt.
    """

    alone: list[float]
    beside: list[float]
    ttft: float


@dataclass
class Measured:
    """One colocation mode. Figures are medians over rounds; ratios are medians of each round's ratio, because the
    machine's speed differs between rounds."""

    name: str
    rounds: list[Round] = field(default_factory=list)

    def alone(self) -> float:
        """The undisturbed gap, in ms."""
        return statistics.median(statistics.median(one.alone) for one in self.rounds)

    def gap(self, quantile: float) -> float:
        """The gap beside the prompt, in ms."""
        return statistics.median(float(np.quantile(one.beside, quantile)) for one in self.rounds)

    def slowdown(self, quantile: float) -> float:
        """The gap beside the prompt, as a multiple of the undisturbed gap."""
        return statistics.median(
            float(np.quantile(one.beside, quantile)) / statistics.median(one.alone) for one in self.rounds
        )

    def ttft(self) -> float:
        """TTFT of the prompt, in ms."""
        return statistics.median(one.ttft for one in self.rounds)

    def ttft_over(self, other: "Measured") -> float:
        """TTFT as a multiple of another mode's."""
        return statistics.median(one.ttft / two.ttft for one, two in zip(self.rounds, other.rounds, strict=True))

    def p99_over(self, other: "Measured") -> float:
        """The p99 gap beside the prompt as a multiple of another mode's."""
        return statistics.median(
            float(np.quantile(one.beside, 0.99) / np.quantile(two.beside, 0.99))
            for one, two in zip(self.rounds, other.rounds, strict=True)
        )


class Bench:
    """Streams that decode, and prompts that arrive meanwhile.

    Args:
        runner: The runner; benches may share it.
        colocation: How prompts run beside decodes.
        name: Name of the mode.
        streams: Number of streams.
        prompt: Length of the prompts in tokens.
    """

    def __init__(self, runner: TorchRunner, colocation: Colocation, name: str, streams: int, prompt: int) -> None:
        self.measured = Measured(name)
        self._driver = EngineDriver(runner, colocation, max_len=runner.config.max_model_len, max_num_seqs=streams + 1)
        self._numbers = np.random.default_rng(0)
        self._vocab = runner.config.vocab_size
        self._prompt = prompt
        self._streams = streams

    def start(self) -> list[str]:
        """Starts the streams and waits until all decode. Returns their names."""
        streams = [self._add(CONTEXT, 1 << 20) for _ in range(self._streams)]
        waiting = set(streams)
        while waiting:
            waiting -= set(self._step())
        return streams

    def stop(self, streams: Sequence[str]) -> None:
        """Ends the streams."""
        for name in streams:
            self._driver.abort(name)

    def round(self, steps: int) -> None:
        """Runs the streams alone for some steps, then beside a prompt, then alone again."""
        streams = self.start()
        alone = [self.timed_step() for _ in range(steps)]
        prompt, start = self._add(self._prompt, 1), time.perf_counter()
        beside: list[float] = []
        done: list[str] = []
        last = start
        while prompt not in done:
            done = self._step()
            now = time.perf_counter()
            if streams[0] in done:
                beside.append(1e3 * (now - last))
                last = now
        ttft = 1e3 * (now - start)
        alone += [self.timed_step() for _ in range(steps)]
        self.measured.rounds.append(Round(alone, beside, ttft))
        self.stop(streams)

    def timed_step(self) -> float:
        """Takes a step and returns its time, in ms."""
        start = time.perf_counter()
        self._step()
        return 1e3 * (time.perf_counter() - start)

    def _add(self, length: int, max_tokens: int) -> str:
        return self._driver.add(self._numbers.integers(0, self._vocab, length).tolist(), max_tokens)

    def _step(self) -> list[str]:
        """Takes a step and returns the requests that got a token."""
        return [output.request_id for output in self._driver.step()]


def steps_in_turn(benches: Sequence[Bench], turns: int) -> list[list[float]]:
    """Times of steps without a prompt, in ms. In each turn every bench takes one step, in random order.

    All benches write the same pages, so only the times are meaningful.
    """
    streams = [bench.start() for bench in benches]
    order, chance = list(range(len(benches))), random.Random(0)
    steps: list[list[float]] = [[] for _ in benches]
    for _ in range(turns):
        chance.shuffle(order)
        for index in order:
            steps[index].append(benches[index].timed_step())
    for bench, names in zip(benches, streams, strict=True):
        bench.stop(names)
    return steps


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and its 95 % confidence interval from order statistics, for any distribution."""
    ordered = sorted(values)
    reach = int(0.98 * len(ordered) ** 0.5) + 1
    middle = len(ordered) // 2
    return statistics.median(ordered), ordered[max(0, middle - reach)], ordered[min(len(ordered) - 1, middle + reach)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint directory")
    parser.add_argument("--streams", type=int, default=8, help="number of streams")
    parser.add_argument("--prompt", type=int, default=2048, help="length of the prompt in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="prompts beside the streams in each mode")
    parser.add_argument("--alone", type=int, default=20, help="steps before and after a prompt")
    parser.add_argument("--turns", type=int, default=400, help="steps of each mode without any prompt; 0 for none")
    parser.add_argument("--budgets", default="32,64,128,256,512,1024,2048", help="token budgets of mixed batches")
    parser.add_argument("--modes", default="lanes,auto", help="further colocation modes")
    parser.add_argument("--profile", type=Path, help="profile of `cpd profile`; by default a few steps are timed")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--html", type=Path, help="file for a chart of the trade-off")
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
        else measure_rough_profile(runner, 4096, device="here", model="0.46 B")
    )
    model = PerfModel(profile)
    ways: list[tuple[str, Mode, int]] = [(f"mixed {size}", "mixed", int(size)) for size in options.budgets.split(",")]
    ways += [(mode, mode, 512) for mode in options.modes.split(",")]

    def make(name: str, mode: Mode, budget: int) -> Bench:
        splits = [split.shares for split in runner.splits]
        colocation = Colocation(model, token_budget=budget, mode=mode, splits=splits, itl_ms=50.0)
        return Bench(runner, colocation, name, options.streams, options.prompt)

    benches = [make(*way) for way in ways]
    for number in range(options.rounds):
        for bench in benches:
            print(f"round {number + 1} of {options.rounds}: {bench.measured.name}", file=sys.stderr)
            bench.round(options.alone)
    if options.rounds:
        report([bench.measured for bench in benches])
        if options.json:
            options.json.write_text(json.dumps([asdict(bench.measured) for bench in benches]) + "\n")
        if options.html:
            draw([bench.measured for bench in benches], options.html)
    if options.turns:
        print(f"{options.turns} turns with no prompt", file=sys.stderr)
        modes: dict[str, Mode] = {"mixed": "mixed", "mixed again": "mixed", "lanes": "lanes"}
        in_turn = [make(name, mode, 512) for name, mode in modes.items()]
        report_turns(list(modes), steps_in_turn(in_turn, options.turns))


def report(results: list[Measured]) -> None:
    """Prints the table. Ratios are to the undisturbed gap of the same rounds, and to mixed batches of 512 tokens."""
    base = next((result for result in results if result.name == "mixed 512"), results[0])
    print(f"\nin brackets: ratios to the undisturbed gap, and to {base.name}\n")
    print("| | undisturbed ms | ITL p50 ms | ITL p99 ms | TTFT ms |\n| --- | --- | --- | --- | --- |")
    for one in results:
        print(
            f"| {one.name} | {one.alone():.1f} | {one.gap(0.5):.1f} ({one.slowdown(0.5):.2f}) "
            f"| {one.gap(0.99):.1f} ({one.slowdown(0.99):.2f}, {one.p99_over(base):.3f}) "
            f"| {one.ttft():.0f} ({one.ttft_over(base):.2f}) |"
        )


def report_turns(names: Sequence[str], steps: Sequence[Sequence[float]]) -> None:
    """Prints the steps without a prompt. Ratios are between steps of the same turn."""
    print("\nno prompt; in brackets: ratio to mixed, median of the turns and its 95 % interval\n")
    print("| | step ms |\n| --- | --- |")
    for name, own in zip(names, steps, strict=True):
        ratio, low, high = median_interval([one / two for one, two in zip(own, steps[0], strict=True)])
        print(f"| {name} | {statistics.median(own):.2f} ({ratio:.4f}, {low:.4f} to {high:.4f}) |")


def draw(results: list[Measured], path: Path) -> None:
    """Draws the gaps of running streams over the prompt's TTFT; lower left is better."""
    alone = statistics.median(result.alone() for result in results)
    waits = [result.ttft() / 1e3 for result in results]
    traces: list[dict[str, Any]] = [
        {"mode": "lines", "name": "undisturbed", "x": [min(waits), max(waits)], "y": [alone, alone]}
    ]
    for quantile, label in ((0.5, "p50"), (0.99, "p99")):
        for mixed, kind in ((True, "mixed"), (False, "lanes and auto")):
            shown = [result for result in results if result.name.startswith("mixed") is mixed]
            traces.append(
                {
                    "mode": "lines+markers+text" if mixed else "markers+text",
                    "name": f"{kind}, {label}",
                    "x": [result.ttft() / 1e3 for result in shown],
                    "y": [result.gap(quantile) for result in shown],
                    "text": [result.name.removeprefix("mixed ") for result in shown],
                    "textposition": "top center",
                }
            )
    axes = {
        "xaxis": {"title": {"text": "TTFT of the prompt, s"}, "type": "log"},
        "yaxis": {"title": {"text": "gap between tokens, ms"}, "type": "log"},
    }
    page = Page(
        "A long prompt beside running streams", f"{len(results[0].rounds)} rounds; undisturbed gap {alone:.1f} ms"
    )
    page.add(Chart("Gaps of running streams against TTFT of the prompt", traces, axes, height=520, wide=True))
    page.write(path)


if __name__ == "__main__":
    main()
