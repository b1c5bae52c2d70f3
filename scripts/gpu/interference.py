"""How much does a burst of prompts slow down running streams, and how long do the prompts wait?

The model has Qwen3 4B's shape and random bfloat16 weights; the engine runs without HTTP. 32 decodes run beside bursts
of 1 to 16 prompts of 128 to 4,096 tokens, as in `cpd bench interference`. The mean gap between a stream's tokens, from
the burst until its last prompt has its first token, is compared with the gap just before it (on the whole device), and
with the gap of the same decodes alone on the decode lane. The baseline, mixed batches, comes first; then the split that
the engine chooses, and each prepared split alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from bench.interference.gaps import mean_gap_ms
from cpd.performance.colocation import Colocation
from engine.execution.executor import Lane, Split
from engine.execution.runner import TorchRunner
from scripts.engine_driver import EngineDriver, as_in_a_worker
from scripts.gpu.common import require
from scripts.gpu.device_model import device_model
from scripts.gpu.models import MODELS
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Report, Target, number, text_table
from scripts.gpu.serving import ITL_MS, MIXED_BUDGET

MODEL = "Qwen3-4B"
DECODES = 32
CONTEXT = 512
PROMPTS = (1, 2, 4, 8, 16)
LENGTHS = (128, 512, 2048, 4096)
SHOWN = (4, 2048)
"""The burst whose TTFT is reported for every mode."""
REPEATS = 2
ALONE_STEPS = 40
MAX_OVER_LANE = Target(at_most=1.15)
MAX_OVER_FULL = Target(at_most=1.35)
"""Another engine reaches 9.4 in the worst cell."""


@dataclass(frozen=True, slots=True)
class LimitedRunner:
    """An `Executor` with only some lanes of a runner."""

    runner: TorchRunner
    full: Lane
    splits: Sequence[Split] = ()

    @property
    def num_pages(self) -> int:
        """Pages of the whole pool."""
        return self.runner.num_pages

    @property
    def vocab_size(self) -> int:
        """See `Executor`."""
        return self.runner.vocab_size

    def copy_page(self, source: int, target: int) -> None:
        """See `Executor`."""
        self.runner.copy_page(source, target)

    def settle(self) -> None:
        """See `Executor`."""
        self.runner.settle()


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst beside the streams.

    Attributes:
        before_ms: Mean gap between a stream's tokens before the burst.
        during_ms: The same during the burst.
        ttft_ms: Median TTFT of the prompts.
        last_ttft_ms: Longest TTFT of the prompts.
    """

    before_ms: float
    during_ms: float
    ttft_ms: float
    last_ttft_ms: float


class Streams:
    """`count` decodes that run without end on one driver."""

    def __init__(self, driver: EngineDriver, count: int, vocab_size: int, max_len: int) -> None:
        self._driver = driver
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        room = max_len - CONTEXT - 1
        self._stamps: dict[str, list[float]] = {self._add(CONTEXT, room): [] for _ in range(count)}
        while not all(self._stamps.values()):
            self._step()

    def alone_ms(self, steps: int) -> float:
        """Mean gap without a burst, over `steps` steps."""
        for stamps in self._stamps.values():
            del stamps[:-1]
        for _ in range(steps):
            self._step()
        return self._mean(min(stamps[0] for stamps in self._stamps.values()), time.perf_counter())

    def beside(self, prompts: int, length: int) -> Burst:
        """Measures a burst of prompts."""
        before = self.alone_ms(ALONE_STEPS)
        sent = time.perf_counter()
        waiting = {self._add(length, 1) for _ in range(prompts)}
        waits: list[float] = []
        while waiting:
            first = self._step() & waiting
            waiting -= first
            waits += [1e3 * (time.perf_counter() - sent)] * len(first)
        end = time.perf_counter()
        self._step()  # completes the gap in which the burst ended
        return Burst(before, self._mean(sent, end), median(waits), waits[-1])

    def stop(self) -> None:
        """Ends all decodes."""
        for name in self._stamps:
            self._driver.abort(name)
        self._driver.finish()

    def _add(self, length: int, max_tokens: int) -> str:
        return self._driver.add(self._rng.integers(self._vocab_size, size=length).tolist(), max_tokens)

    def _step(self) -> set[str]:
        """Takes a step. Returns the requests that got a token."""
        names = {output.request_id for output in self._driver.step()}
        now = time.perf_counter()
        for name in names & self._stamps.keys():
            self._stamps[name].append(now)
        return names

    def _mean(self, start_s: float, end_s: float) -> float:
        gap = mean_gap_ms(list(self._stamps.values()), start_s, end_s)
        assert gap is not None, "streams have tokens before and after"
        return gap


def measure_all(report: Report, fields: Mapping[str, object], device: str = "cuda") -> None:
    """Measures all figures of a model with these config.json fields."""
    most = DECODES + max(PROMPTS)
    tokens = DECODES * CONTEXT * 4 + max(PROMPTS) * (max(LENGTHS) + 64)
    runner = random_runner(fields, tokens=tokens, graph_decodes=most, lanes=True, device=device)
    model = device_model(report, runner, MODEL, most_seqs=most)

    def streams(limited: LimitedRunner, rule: Colocation) -> Streams:
        driver = EngineDriver(limited, rule, max_len=runner.config.max_model_len, max_num_seqs=most)
        return Streams(driver, DECODES, runner.config.vocab_size, runner.config.max_model_len)

    def measure(name: str, rule: Colocation, lane_ms: float | None = None) -> None:
        splits = [split for split in runner.splits if split.shares in rule.splits]
        cells = {}
        for prompts in PROMPTS:
            for length in LENGTHS:
                decodes = streams(LimitedRunner(runner, runner.full, splits), rule)
                bursts = [decodes.beside(prompts, length) for _ in range(REPEATS)]
                decodes.stop()
                cells[prompts, length] = bursts
        _report(report, name, cells, lane_ms)

    def lanes(splits: Sequence[Split]) -> Colocation:
        return Colocation(model, mode="lanes", splits=[split.shares for split in splits], itl_ms=ITL_MS)

    mixed = Colocation(model, token_budget=MIXED_BUDGET, mode="mixed")
    measure("mixed", mixed)  # the baseline first, so that a run that is cut short has it
    measure("lanes", lanes(runner.splits))
    for split in runner.splits:
        decodes = streams(LimitedRunner(runner, split.decode), mixed)
        alone_ms = median(decodes.alone_ms(ALONE_STEPS) for _ in range(REPEATS))
        decodes.stop()
        name = f"decodes on {split.decode.share:.0%}"
        report.add(f"{MODEL}: {DECODES} {name}, alone", alone_ms, "ms")
        measure(name, lanes([split]), alone_ms)


def _report(report: Report, name: str, cells: Mapping[tuple[int, int], Sequence[Burst]], lane_ms: float | None) -> None:
    """Reports the worst burst of one mode, and all bursts as a table and in the file.

    Args:
        lane_ms: Gap of the same decodes alone on the decode lane; None if the mode uses several splits.
    """
    over_full = {cell: median(burst.during_ms / burst.before_ms for burst in bursts) for cell, bursts in cells.items()}
    over_lane = {cell: median(burst.during_ms for burst in bursts) / (lane_ms or 1) for cell, bursts in cells.items()}
    ttft = {cell: median(burst.ttft_ms for burst in bursts) for cell, bursts in cells.items()}
    title = f"{MODEL}: {DECODES} decodes beside bursts, {name}"
    targets = name != "mixed"
    for over, ratios, target in (
        ("undisturbed", over_full, MAX_OVER_FULL),
        ("the decode lane alone", over_lane if lane_ms else {}, MAX_OVER_LANE),
    ):
        if ratios:
            worst = max(ratios, key=lambda cell: ratios[cell])
            note = f"beside {worst[0]} x {worst[1]:,}"
            report.add(
                f"{title}: worst gap / {over}", ratios[worst], "ratio", target=target if targets else None, note=note
            )
    shown = SHOWN if SHOWN in cells else max(cells)
    last = median(burst.last_ttft_ms for burst in cells[shown])
    report.add(f"{title}: TTFT beside {shown[0]} x {shown[1]:,}", ttft[shown], "ms", note=f"the last one {last:.4g}")
    report.add_series(
        name,
        [
            {"prompts": prompts, "tokens": length, **asdict(burst)}
            for (prompts, length), bursts in cells.items()
            for burst in bursts
        ],
    )
    rows = [
        [f"{prompts} x {length:,}", f"{over_full[prompts, length]:.2f}", number(ttft[prompts, length])]
        for prompts, length in cells
    ]
    print(f"\n{name}\n{text_table(('burst', 'gap / undisturbed', 'TTFT ms'), rows)}\n", flush=True)


def run(report: Report) -> None:
    """Runs the experiment. Needs FlashInfer: the engine has no attention kernel and no graphs without it."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    measure_all(report, MODELS[MODEL])
