"""What do concurrent conversations gain from lanes, compared with mixed batches?

The model has Qwen3 4B's shape and random bfloat16 weights; the engine runs without HTTP. In conversations of several
turns every prompt is the whole conversation so far plus new tokens, as in `cpd bench run --workload multi-turn`. The
next turn starts as soon as the one before is answered. First the device is measured (a short `cpd profile`), so that
the engine can predict its steps.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cpd.performance.colocation import Colocation, Mode
from cpd.performance.model import PerfModel
from engine.execution.runner import TorchRunner
from scripts.engine_driver import EngineDriver, as_in_a_worker
from scripts.gpu.common import require
from scripts.gpu.device_model import device_model
from scripts.gpu.models import MODELS
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Report, Target

MODEL = "Qwen3-4B"
ITL_MS = 50.0
"""The workers' default ITL target."""
MIXED_BUDGET = 2048
"""Token budget of a mixed batch; engines without lanes use this for GPUs of this size."""
MAX_ITL = Target(at_most=0.5)
MAX_TTFT = Target(at_most=1.2)
MIN_THROUGHPUT = Target(at_least=1.0)


@dataclass(frozen=True, slots=True)
class ConversationKind:
    """A kind of conversation.

    Attributes:
        first: Tokens of the first prompt.
        later: New tokens of each later prompt.
        output: Tokens of each answer.
    """

    name: str
    first: int
    later: int
    output: int
    turns: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of the whole conversation."""
        return self.first + (self.turns - 1) * self.later + self.turns * self.output


CONVERSATION_KINDS = (ConversationKind("heavy", 2048, 512, 256), ConversationKind("light", 512, 256, 256))
CONCURRENCIES = (64, 16)
WAVES = 1.5
"""Conversations in all, per concurrent one, so that new ones start at different times."""


@dataclass(slots=True)
class Served:
    """Latencies as clients would see them.

    Attributes:
        ttft_ms: Time to first token of each turn.
        gaps_ms: All gaps between tokens of a stream.
        seconds: Time from the first prompt to the last token.
    """

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ttft_p50(self) -> float:
        """Median TTFT, ms."""
        return float(np.median(self.ttft_ms))

    def itl(self, quantile: float) -> float:
        """Quantile of the gaps, ms."""
        return float(np.quantile(self.gaps_ms, quantile))

    @property
    def tokens_s(self) -> float:
        """Output tokens a second."""
        return (len(self.ttft_ms) + len(self.gaps_ms)) / self.seconds


@dataclass(slots=True)
class _Conversation:
    """A running conversation.

    Attributes:
        said: All tokens so far.
        last_s: Time at which the prompt was sent or the last token came.
        left: Tokens left in the running answer.
    """

    rng: np.random.Generator
    said: list[int] = field(default_factory=list)
    turn: int = 0
    last_s: float = 0.0
    left: int = 0


def serve(
    driver: EngineDriver, kind: ConversationKind, *, conversations: int, concurrency: int, vocab_size: int
) -> Served:
    """Runs conversations, `concurrency` at a time. Calls with equal arguments send equal prompts."""
    served = Served()
    waiting = [_Conversation(np.random.default_rng(index)) for index in reversed(range(conversations))]
    answering: dict[str, _Conversation] = {}

    def send(conversation: _Conversation) -> None:
        new = kind.later if conversation.turn else kind.first
        conversation.said += conversation.rng.integers(vocab_size, size=new).tolist()
        conversation.turn += 1
        conversation.left, conversation.last_s = kind.output, time.perf_counter()
        answering[driver.add(conversation.said, kind.output)] = conversation

    began = time.perf_counter()
    for _ in range(min(concurrency, conversations)):
        send(waiting.pop())
    while answering:
        outputs = driver.step()
        now = time.perf_counter()
        for output in outputs:
            conversation = answering[output.request_id]
            gap = 1e3 * (now - conversation.last_s)
            (served.ttft_ms if conversation.left == kind.output else served.gaps_ms).append(gap)
            conversation.last_s = now
            conversation.left -= 1
            conversation.said += output.token_ids
            if output.finish is not None:
                del answering[output.request_id]
                if conversation.turn < kind.turns:
                    send(conversation)
                elif waiting:
                    send(waiting.pop())
    served.seconds = time.perf_counter() - began
    driver.finish()
    return served


def measure_all(report: Report, fields: Mapping[str, object], device: str = "cuda") -> None:
    """Measures all figures of a model with these config.json fields."""
    most = max(CONCURRENCIES)
    tokens = most * (max(kind.tokens for kind in CONVERSATION_KINDS) + 64)
    runner = random_runner(fields, tokens=tokens, graph_decodes=most, lanes=True, device=device)
    model = device_model(report, runner, MODEL, most_seqs=most)
    _measure(report, runner, model, ConversationKind("warm-up", 64, 32, 8, turns=2), 4, "lanes")
    mixed = {}
    for modes in (("mixed", "lanes"), ("auto",)):  # modes with targets first
        for kind in CONVERSATION_KINDS:
            for concurrency in CONCURRENCIES:
                for mode in modes:
                    served = _measure(report, runner, model, kind, concurrency, mode)
                    name = f"{MODEL}: {kind.name} x {concurrency}"
                    if mode == "mixed":
                        mixed[name] = served
                    else:
                        _compare(report, f"{name}: {mode} / mixed", served, mixed[name], targets=mode == "lanes")


def _measure(
    report: Report, runner: TorchRunner, model: PerfModel, kind: ConversationKind, concurrency: int, mode: Mode
) -> Served:
    """Measures one kind of conversation in one mode."""
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
        kind,
        conversations=round(WAVES * concurrency),
        concurrency=concurrency,
        vocab_size=runner.config.vocab_size,
    )
    name = f"{MODEL}: {kind.name} x {concurrency}, {mode}"
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
    """Runs the experiment. Needs FlashInfer: the engine has no attention kernel and no graphs without it."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    measure_all(report, MODELS[MODEL])
