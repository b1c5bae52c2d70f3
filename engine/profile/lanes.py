"""Measures all lanes of a runner: each share of the device alone, and both lanes of each split at the same time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from cpd.performance.fit import Sample
from engine.batch import Batch
from engine.execution.executor import Executor, Lane, Split
from engine.profile.measure import Limits, Progress, allowed, decode_series, measure, mixed_series, prefill_series
from engine.profile.steps import RunStep, Step, StepBatches, step_timer

MAX_BACKGROUND_MS = 2000.0
"""Longest prefill that runs in the background of measured decodes."""

MAX_BACKGROUND_SEQS = 16
"""Most decodes that run in the background of measured prefills."""

_DECODES = [[Step.decode(seqs, context) for seqs in (1, 8, 64)] for context in (256, 2048)]
_PREFILLS = [[Step.prefill(tokens) for tokens in (64, 256, 1024)]]
_TRIES = 3


def measure_samples(runner: Executor, limits: Limits, seconds: float, on_progress: Progress) -> list[Sample]:
    """Measures the samples to which a profile is fitted.

    Args:
        runner: Runner that only this thread uses.
        limits: Limits of its steps.
        seconds: Time to spend, divided equally among shares of the device and splits.
    """
    lanes = {_share(lane): lane for split in runner.splits for lane in (split.prefill, split.decode)}
    lanes[1.0] = runner.full
    rounds, done = len(lanes) + len(runner.splits), 0

    def progress(fraction: float) -> None:
        on_progress("measuring", (done + fraction) / rounds)

    batches = StepBatches(runner)
    series = decode_series(limits) + prefill_series(limits) + mixed_series(limits)
    alone: dict[float, dict[Step, float]] = {}
    samples: list[Sample] = []
    for share, lane in lanes.items():
        alone[share] = dict(measure(step_timer(lane, batches), series, seconds / rounds, progress))
        samples += [Sample(step.work, ms, share) for step, ms in alone[share].items()]
        done += 1
    for split in runner.splits:
        samples += _measure_split(runner, split, alone, limits, seconds / rounds, progress)
        done += 1
    return samples


def _measure_split(
    runner: Executor,
    split: Split,
    alone: Mapping[float, Mapping[Step, float]],
    limits: Limits,
    seconds: float,
    on_progress: Callable[[float], None],
) -> list[Sample]:
    """Measures each lane of a split while the other one is busy.

    Args:
        alone: Times of each share's steps while the other lane was idle.
    """
    prefill, decode = _background(alone[_share(split.prefill)], alone[_share(split.decode)], limits.pages // 2)
    samples: list[Sample] = []

    def progress(done: int, fraction: float) -> None:
        on_progress((done + fraction) / 2)

    for done, lane, timed, background, series in (
        (0, split.decode, decodes_during_prefill, prefill, _DECODES),
        (1, split.prefill, prefills_during_decodes, decode, _PREFILLS),
    ):
        remaining = replace(limits, pages=limits.pages - background.pages)
        busy, batches = StepBatches(runner).make(background), StepBatches(runner, skip=background.pages)
        with timed(split, busy, batches) as run:
            measured = measure(run, allowed(remaining, series), seconds / 2, partial(progress, done))
        samples += [Sample(step.work, ms, _share(lane), background.work) for step, ms in measured]
    return samples


@contextmanager
def decodes_during_prefill(split: Split, prefill: Batch, batches: StepBatches) -> Iterator[RunStep]:
    """Times decodes on one lane of a split while the other one prefills continuously."""

    def run(step: Step) -> float:
        batch = batches.make(step)
        for _ in range(_TRIES):  # a step that is longer than the prefill never has it all the time
            if split.prefill.done():
                split.prefill.collect()
                split.prefill.launch(prefill)
            split.decode.launch(batch)
            ms = split.decode.collect().ms
            if not split.prefill.done():
                break
        return ms

    split.prefill.launch(prefill)
    try:
        yield run
    finally:
        split.prefill.collect()


@contextmanager
def prefills_during_decodes(split: Split, decode: Batch, batches: StepBatches) -> Iterator[RunStep]:
    """Times prefills on one lane of a split while the other one decodes continuously."""

    def run(step: Step) -> float:
        split.prefill.launch(batches.make(step))
        while not split.prefill.done():
            split.decode.launch(decode)
            split.decode.collect()
        return split.prefill.collect().ms

    yield run


def _background(prefills: Mapping[Step, float], decodes: Mapping[Step, float], pages: int) -> tuple[Step, Step]:
    """Chooses a long prefill and a batch of decodes from the measured steps, to keep a lane busy."""
    prefill = max(
        (step for step in prefills if len(step.chunks) == 1 and step.pages <= pages),
        key=lambda step: prefills[step] if prefills[step] <= MAX_BACKGROUND_MS else -prefills[step],
    )
    fitting = (step for step in decodes if step.work.is_decode and step.pages <= pages)
    decode = max(
        (step for step in fitting if len(step.chunks) <= MAX_BACKGROUND_SEQS), key=lambda step: step.work.context
    )
    return prefill, decode


def _share(lane: Lane) -> float:
    """Rounds a lane's share, so that equal shares of different splits compare equal."""
    return round(lane.share, 6)
