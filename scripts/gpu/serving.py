"""What do lanes give several conversations at once, against prompts cut into the batches of the decodes?

Qwen3 4B's shape in bfloat16 with random weights, on the engine without HTTP. Conversations of several turns, in which
every prompt is all that was said before and some new tokens, as in `cpd bench run --workload multi-turn`; the next turn
comes as soon as the last one is answered. First the device is measured (`cpd profile` in short), for the engine to
know how long its steps take.

Usage: `python -m scripts.gpu.serving [--out DIR]`
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel
from engine.execution.runner import TorchRunner
from scripts.engine_driver import EngineDriver, as_in_a_worker
from scripts.gpu.common import require, run_experiment
from scripts.gpu.device_model import device_model
from scripts.gpu.models import MODELS
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Report, Target

QUESTION = "What do lanes give conversations beside each other, against chunks in the decodes' batches?"
MODEL = "Qwen3-4B"
ITL_MS = 50.0
"""The target that workers have unless they are told otherwise."""
MIXED_BUDGET = 2048
"""Tokens of a mixed batch, as engines without lanes have it for GPUs of this size."""
MAX_ITL = Target(at_most=0.5)
MAX_TTFT = Target(at_most=1.2)
MIN_THROUGHPUT = Target(at_least=1.0)


@dataclass(frozen=True, slots=True)
class Talk:
    """A kind of conversation, in tokens.

    Attributes:
        first: Of the first prompt.
        later: New ones of each later prompt.
        output: Of each answer.
    """

    name: str
    first: int
    later: int
    output: int
    turns: int = 4

    @property
    def tokens(self) -> int:
        """All of them, when it is over."""
        return self.first + (self.turns - 1) * self.later + self.turns * self.output


TALKS = (Talk("heavy", 2048, 512, 256), Talk("light", 512, 256, 256))
CONCURRENCIES = (64, 16)
WAVES = 1.5
"""Conversations for each one that runs at the same time: after the first ones others begin, at different times."""


@dataclass(slots=True)
class Served:
    """What clients would have seen.

    Attributes:
        ttft_ms: Of each turn.
        gaps_ms: Between tokens of a stream, all of them.
        seconds: From the first prompt to the last token.
    """

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ttft_p50(self) -> float:
        """ms"""
        return float(np.median(self.ttft_ms))

    def itl(self, quantile: float) -> float:
        """ms"""
        return float(np.quantile(self.gaps_ms, quantile))

    @property
    def tokens_s(self) -> float:
        """Output tokens a second."""
        return (len(self.ttft_ms) + len(self.gaps_ms)) / self.seconds


@dataclass(slots=True)
class _Conversation:
    """One that goes on.

    Attributes:
        said: All tokens so far.
        last_s: When the prompt was sent, or its last token came.
        left: Of the running answer.
    """

    rng: np.random.Generator
    said: list[int] = field(default_factory=list)
    turn: int = 0
    last_s: float = 0.0
    left: int = 0


def serve(driver: EngineDriver, talk: Talk, *, conversations: int, concurrency: int, vocab_size: int) -> Served:
    """Has so many conversations, `concurrency` of them at a time. Every call with equal arguments sends the same."""
    served = Served()
    waiting = [_Conversation(np.random.default_rng(index)) for index in reversed(range(conversations))]
    answering: dict[str, _Conversation] = {}

    def send(conversation: _Conversation) -> None:
        new = talk.later if conversation.turn else talk.first
        conversation.said += conversation.rng.integers(vocab_size, size=new).tolist()
        conversation.turn += 1
        conversation.left, conversation.last_s = talk.output, time.perf_counter()
        answering[driver.add(conversation.said, talk.output)] = conversation

    began = time.perf_counter()
    for _ in range(min(concurrency, conversations)):
        send(waiting.pop())
    while answering:
        outputs = driver.step()
        now = time.perf_counter()
        for output in outputs:
            conversation = answering[output.request_id]
            gap = 1e3 * (now - conversation.last_s)
            (served.ttft_ms if conversation.left == talk.output else served.gaps_ms).append(gap)
            conversation.last_s = now
            conversation.left -= 1
            conversation.said += output.token_ids
            if output.finish is not None:
                del answering[output.request_id]
                if conversation.turn < talk.turns:
                    send(conversation)
                elif waiting:
                    send(waiting.pop())
    served.seconds = time.perf_counter() - began
    driver.finish()
    return served


def measure_all(report: Report, fields: Mapping[str, object], device: str = "cuda") -> None:
    """Every figure, for a model of this config.json."""
    most = max(CONCURRENCIES)
    tokens = most * (max(talk.tokens for talk in TALKS) + 64)
    runner = random_runner(fields, tokens=tokens, graph_decodes=most, lanes=True, device=device)
    model = device_model(report, runner, MODEL, most_seqs=most)
    _measure(report, runner, model, Talk("warm-up", 64, 32, 8, turns=2), 4, "lanes")
    mixed = {}
    for modes in (("mixed", "lanes"), ("auto",)):  # what has targets comes first
        for talk in TALKS:
            for concurrency in CONCURRENCIES:
                for mode in modes:
                    served = _measure(report, runner, model, talk, concurrency, mode)
                    name = f"{MODEL}: {talk.name} x {concurrency}"
                    if mode == "mixed":
                        mixed[name] = served
                    else:
                        _compare(report, f"{name}: {mode} / mixed", served, mixed[name], targets=mode == "lanes")


def _measure(report: Report, runner: TorchRunner, model: PerfModel, talk: Talk, concurrency: int, mode: Mode) -> Served:
    """One kind of conversation in one mode."""
    colocation = Colocation(
        model,
        token_budget=MIXED_BUDGET if mode == "mixed" else 0,
        mode=mode,
        splits=[split.shares for split in runner.splits],
        itl_ms=ITL_MS,
    )
    driver = EngineDriver(runner, colocation, max_len=runner.config.max_model_len, max_num_seqs=concurrency)
    served = serve(
        driver,
        talk,
        conversations=round(WAVES * concurrency),
        concurrency=concurrency,
        vocab_size=runner.config.vocab_size,
    )
    name = f"{MODEL}: {talk.name} x {concurrency}, {mode}"
    note = f"{len(served.ttft_ms)} turns in {served.seconds:.3g} s; batches of {colocation.max_tokens:,} at most"
    report.add(f"{name}: throughput", served.tokens_s, "tokens/s", note=note)
    report.add(f"{name}: TTFT p50", served.ttft_p50, "ms", note=f"p99 {np.quantile(served.ttft_ms, 0.99):.4g}")
    report.add(f"{name}: ITL p99", served.itl(0.99), "ms", note=f"p50 {served.itl(0.5):.4g}, most {served.itl(1):.4g}")
    return served


def _compare(report: Report, name: str, served: Served, base: Served, *, targets: bool) -> None:
    ratios = (
        ("ITL p99", served.itl(0.99) / base.itl(0.99), MAX_ITL),
        ("TTFT p50", served.ttft_p50 / base.ttft_p50, MAX_TTFT),
        ("throughput", served.tokens_s / base.tokens_s, MIN_THROUGHPUT),
    )
    for what, ratio, target in ratios:
        report.add(f"{name}: {what}", ratio, "ratio", target=target if targets else None)


def run(report: Report) -> None:
    """See the module. Without FlashInfer the engine has neither its attention nor graphs."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    measure_all(report, MODELS[MODEL])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    return run_experiment("serving", QUESTION, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
