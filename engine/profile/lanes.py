"""Measures all lanes of a runner: each share of the device alone, and the lanes of a split beside each other."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

from cpd.performance.fit import Sample
from engine.batch import Batch
from engine.execution.executor import Executor, Lane, Split
from engine.profile.measure import Limits, Progress, allowed, decode_series, measure, mixed_series, prefill_series
from engine.profile.steps import Step, StepBatches, StepTimer

COMPANY_MS = 2000.0
"""The prefill beside measured decodes takes no longer than this."""

COMPANY_SEQS = 16
"""The decodes beside measured prefills are at most so many."""

_DECODES = [[Step.decode(seqs, context) for seqs in (1, 8, 64)] for context in (256, 2048)]
_PREFILLS = [[Step.prefill(tokens) for tokens in (64, 256, 1024)]]
_TRIES = 3


def measure_samples(runner: Executor, limits: Limits, seconds: float, on_progress: Progress) -> list[Sample]:
    """Measures what a profile is fitted to.

    Args:
        runner: Used by this thread alone.
        limits: Of its steps.
        seconds: To spend, divided evenly among the shares of the device and the splits.
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
        alone[share] = dict(measure(StepTimer(lane, batches), series, seconds / rounds, progress))
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
    """Each lane of a split while the other one is busy.

    Args:
        alone: Times of the steps of each share without company.
    """
    prefill, decode = _company(alone[_share(split.prefill)], alone[_share(split.decode)], limits.pages // 2)
    samples: list[Sample] = []

    def progress(done: int, fraction: float) -> None:
        on_progress((done + fraction) / 2)

    for done, lane, timer_of, company, series in (
        (0, split.decode, BesidePrefill, prefill, _DECODES),
        (1, split.prefill, BesideDecodes, decode, _PREFILLS),
    ):
        room = replace(limits, pages=limits.pages - company.pages)
        busy, batches = StepBatches(runner).make(company), StepBatches(runner, skip=company.pages)
        with closing(timer_of(split, busy, batches)) as timer:
            measured = measure(timer, allowed(room, series), seconds / 2, partial(progress, done))
        samples += [Sample(step.work, ms, _share(lane), company.work) for step, ms in measured]
    return samples


class BesidePrefill:
    """Times decodes on one lane of a split, while the other one prefills without a pause."""

    def __init__(self, split: Split, prefill: Batch, batches: StepBatches) -> None:
        self._split = split
        self._prefill = prefill
        self._batches = batches
        split.prefill.launch(prefill)

    def __call__(self, step: Step) -> float:
        """ms that it ran. The other lane was busy to the end, unless the step is too long for that."""
        batch = self._batches.make(step)
        for _ in range(_TRIES):
            if self._split.prefill.done():
                self._split.prefill.collect()
                self._split.prefill.launch(self._prefill)
            self._split.decode.launch(batch)
            ms = self._split.decode.collect().ms
            if not self._split.prefill.done():
                break
        return ms

    def close(self) -> None:
        """Waits for the other lane."""
        self._split.prefill.collect()


class BesideDecodes:
    """Times prefills on one lane of a split, while the other one decodes without a pause."""

    def __init__(self, split: Split, decode: Batch, batches: StepBatches) -> None:
        self._split = split
        self._decode = decode
        self._batches = batches

    def __call__(self, step: Step) -> float:
        """ms that it ran."""
        self._split.prefill.launch(self._batches.make(step))
        while not self._split.prefill.done():
            self._split.decode.launch(self._decode)
            self._split.decode.collect()
        return self._split.prefill.collect().ms

    def close(self) -> None:
        """Nothing runs."""


def _company(prefills: Mapping[Step, float], decodes: Mapping[Step, float], pages: int) -> tuple[Step, Step]:
    """A long prefill and a batch of decodes that keep a lane busy, among steps that were measured."""
    prefill = max(
        (step for step in prefills if len(step.chunks) == 1 and step.pages <= pages),
        key=lambda step: prefills[step] if prefills[step] <= COMPANY_MS else -prefills[step],
    )
    decode = max(
        (step for step in decodes if step.work.is_decode and step.pages <= pages and len(step.chunks) <= COMPANY_SEQS),
        key=lambda step: step.work.context,
    )
    return prefill, decode


def _share(lane: Lane) -> float:
    """The two thirds of one split are those of another one, whatever the rounding."""
    return round(lane.share, 6)
