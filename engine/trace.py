"""What recent steps consisted of, when they ran, and how long they took."""

from collections import deque
from statistics import median
from typing import NamedTuple

from engine.execution.executor import StepResult
from engine.inflight import InFlightStep, LaneKind

MAX_RECORDS = 16_384

RECENT_STEPS = 32
"""Number of steps whose times go into load reports."""

MIN_STEPS_TO_COMPARE = 8
"""The slowdown of fewer steps than this is noise."""

MIN_SLOWDOWN = 1 / 16
"""A simulated device may take no time at all."""


class StepRecord(NamedTuple):
    """One batch on one lane. (A tuple, because one is made in each step.)

    Attributes:
        lane: The kind of lane that it ran on.
        share: The lane's share of the device, 0 to 1.
        start_s: Start time, from `time.perf_counter`.
        ms: Duration.
        decodes: Number of sequences that computed one token.
        decode_context: Sum of the tokens that these attended to.
        prefills: Number of sequences that computed several tokens.
        prefill_tokens: Sum of the tokens that these computed.
        prefill_context: Sum of the tokens that the last token of each attended to.
        waiting: Number of sequences that did not run when the step was collected.
        waiting_tokens: Tokens of the requests among them that had never run.
    """

    lane: LaneKind
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
    """Records of the last steps, in the order in which they were collected."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, step: InFlightStep, result: StepResult, waiting: int, waiting_tokens: int) -> None:
        """Records a collected step."""
        decodes, prefills = len(step.plan.decodes), step.plan.prefills
        prefill_context = sum([chunk.end for chunk in prefills])
        self._records.append(
            StepRecord(
                lane=step.lane_kind,
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
        """All recorded steps, oldest first."""
        return list(self._records)


class StepTimes:
    """Durations of the recent steps on the full lane and the decode lanes."""

    def __init__(self) -> None:
        self._decode_ms: deque[float] = deque(maxlen=RECENT_STEPS)
        self._slowdowns: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, ms: float, predicted_ms: float, *, decodes: bool) -> None:
        """Records a step's duration, the predicted one (0: unknown), and whether the step had decodes."""
        if predicted_ms:
            self._slowdowns.append(ms / predicted_ms)
        if decodes:
            self._decode_ms.append(ms)

    @property
    def decode_ms(self) -> float:
        """Mean duration of the recent steps that had decodes; 0 if there were none."""
        return sum(self._decode_ms) / len(self._decode_ms) if self._decode_ms else 0.0

    @property
    def slowdown(self) -> float:
        """Median ratio of the recent steps' measured to predicted durations; 0 if there were too few."""
        return median(self._slowdowns) if len(self._slowdowns) >= MIN_STEPS_TO_COMPARE else 0.0

    @property
    def slowdown_p90(self) -> float:
        """90th percentile of that ratio, at least MIN_SLOWDOWN; 1 if there were too few steps."""
        count = len(self._slowdowns)
        return max(MIN_SLOWDOWN, sorted(self._slowdowns)[9 * count // 10]) if count >= MIN_STEPS_TO_COMPARE else 1.0
