"""What the steps of the recent past consisted of, and when they ran."""

from collections import deque
from typing import Literal, NamedTuple

from cpd.perfmodel import Work
from engine.batch import Ran
from engine.plan import Plan

LaneName = Literal["full", "prefill", "decode"]

KEPT_STEPS = 16_384


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
        self._records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)

    def add(
        self, lane: LaneName, share: float, plan: Plan, work: Work, ran: Ran, waiting: int, waiting_tokens: int
    ) -> None:
        """A plan, which is so much work, has been computed."""
        decodes, prefills = len(plan.singles), plan.longer
        prefill_context = sum(chunk.start + chunk.count for chunk in prefills)
        self._records.append(
            StepRecord(
                lane=lane,
                share=share,
                start_s=ran.start_s,
                ms=ran.ms,
                decodes=decodes,
                decode_context=work.context - prefill_context,
                prefills=len(prefills),
                prefill_tokens=work.tokens - decodes,
                prefill_context=prefill_context,
                waiting=waiting,
                waiting_tokens=waiting_tokens,
            )
        )

    def records(self) -> list[StepRecord]:
        """All that is kept, oldest first."""
        return list(self._records)
