"""The step that is on its way on the full lane or on a decode lane.

A lane that works by itself, as a GPU's does, is given the next step before the tokens of this one are looked at:

    launch N ─▶ launch N + 1, which takes N's tokens where they are ─▶ collect N: ends, outputs, blocks ─▶ …

So the device has work while the host does its own. Only decodes of the same sequences follow in this way
(`Scheduler.decodes_after`): for whatever else is to be decided, the step is collected first.

A sequence that ends with N, or is aborted meanwhile, has been computed once too often in N + 1. That is dropped, and
its pages are nobody else's before N + 1 has been collected.
"""

from dataclasses import dataclass, field

from cpd.perfmodel import Work
from engine.batch import Lane
from engine.plan import Plan
from engine.trace import LaneName


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step.

    Attributes:
        name: Of the lane's kind.
        predicted_ms: How long the performance model says that it takes; 0: it does not know.
        freed: Pages that sequences have left since; to be released when the step has been collected.
    """

    lane: Lane
    name: LaneName
    plan: Plan
    work: Work
    predicted_ms: float
    freed: list[int] = field(default_factory=list)
