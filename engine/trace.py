"""What the steps of the recent past consisted of, and when they ran."""

from collections import deque
from typing import NamedTuple

from engine.execution.executor import StepResult
from engine.inflight import InFlightStep, LaneName

MAX_RECORDS = 16_384


class StepRecord(NamedTuple):
    """One batch on one lane. (A tuple, because one is made in each step.)

    Attributes:
        lane: Where it ran.
        share: How much of the device that is.
        start_s: When it began to run, by `time.perf_counter`.
        ms: How long it ran.
        decodes: Sequences that computed one token.
        decode_context: Tokens that these attended to, summed.
        prefills: Sequences that computed more.
        prefill_tokens: What these computed, summed.
        prefill_context: Tokens that their last ones attended to, summed.
        waiting: Sequences that were not running when it was over.
        waiting_tokens: Tokens of those that had never run.
    """

    lane: LaneName
    share: float
    start_s: float
    ms: float
    decodes: int
    decode_context: int
    prefills: int
    prefill_tokens: int
    prefill_context: int
    waiting: int
    waiting_tokens: int


class StepTrace:
    """The last steps, in the order in which they were collected."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, step: InFlightStep, result: StepResult, waiting: int, waiting_tokens: int) -> None:
        """A step has been collected."""
        decodes, prefills = len(step.plan.decodes), step.plan.prefills
        prefill_context = sum(chunk.end for chunk in prefills)
        self._records.append(
            StepRecord(
                lane=step.name,
                share=step.lane.share,
                start_s=result.start_s,
                ms=result.ms,
                decodes=decodes,
                decode_context=step.work.context - prefill_context,
                prefills=len(prefills),
                prefill_tokens=step.work.tokens - decodes,
                prefill_context=prefill_context,
                waiting=waiting,
                waiting_tokens=waiting_tokens,
            )
        )

    def records(self) -> list[StepRecord]:
        """All steps that are still known, oldest first."""
        return list(self._records)
