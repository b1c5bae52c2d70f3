"""Steps that are launched and not collected.

    main     the full lane, or the decode lane of a split
             launch N ─▶ launch N + 1, which takes N's tokens where they are ─▶ collect N: ends, outputs, blocks ─▶ …
    prefill  the prefill lane of a split, for as long as it has something to do
             launch ─▶ launch the prompt's next chunk ─▶ (done: asked between steps, never waited for) ─▶ collect ─▶ …

**Overlap scheduling** (as in SGLang): a lane that works by itself, as a GPU's does, has the next step before the tokens
of this one are looked at. Only decodes of the same sequences overlap (`engine.scheduling.lookahead`); for whatever else
is to be decided, the step is collected first. A sequence that ends with N, or is aborted meanwhile, has been computed
once too often in N + 1, and that token is dropped. A prefill lane that is asked between steps would idle for half a
step on average; so the prompt's next chunk is launched while one runs, if the split stays as it is.

Who owns what while steps are in flight, so that nothing which a lane still uses is freed or changed:

| what                        | owner                                       | until                                 |
| pages of its sequences      | the sequences; when one ends, the step that | they end; the step is collected       |
|                             | was launched last on its lane               |                                       |
| rows of the sequence table  | the sequences; the batch has copies of all  | a sequence ends: it may at any moment |
|                             | but the tokens that sampling looks at       |                                       |
| blocks of a chunk           | the sequence; others can't find them        | the step is collected                 |
| the batch                   | the lane                                    | the step's end                        |
| buffers and workspaces      | the lane                                    | the executor goes                     |

A sequence that is aborted is gone at once, and what comes out for it is dropped (another one may have its row by then);
only its pages stay. A sequence on the prefill lane is never preempted: what needs its pages waits for the chunk's end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from cpd.performance.model import Work
from engine.execution.executor import Lane, Split, StepResult
from engine.kv.block_pool import BlockPool
from engine.scheduling.plan import BuildBatch, Plan
from engine.scheduling.sequence import Sequence, SequenceTable

LaneName = Literal["full", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step.

    Attributes:
        name: Of the lane's kind.
        predicted_ms: How long the performance model says that it takes; 0: unknown.
        pages: That ended sequences have left since; released when the step is collected.
    """

    lane: Lane
    name: LaneName
    plan: Plan
    work: Work
    predicted_ms: float = 0.0
    pages: list[int] = field(default_factory=list)


class InFlight:
    """Launches and collects steps.

    Args:
        full: The whole device's lane.
        build: Makes the batches.

    Attributes:
        main: Steps on the full lane or a decode lane, oldest first: two while steps overlap.
        prefill: Steps on a prefill lane, oldest first: two while a chunk is queued.
        split: Whose lanes are in use; None while the prefill lane has nothing to do.
    """

    def __init__(self, full: Lane, pool: BlockPool, table: SequenceTable, build: BuildBatch) -> None:
        self.main: deque[InFlightStep] = deque()
        self.prefill: deque[InFlightStep] = deque()
        self.split: Split | None = None
        self._full = full
        self._pool = pool
        self._table = table
        self._build = build
        self._prefills_collected = 0

    def __bool__(self) -> bool:
        return bool(self.main or self.prefill)

    @property
    def main_lane(self) -> Lane:
        """The lane for whatever does not go to the prefill lane."""
        return self.split.decode if self.split else self._full

    @property
    def prefill_work(self) -> Work | None:
        """What the prefill lane computes; None: nothing."""
        return self.prefill[0].work if self.prefill else None

    @property
    def prefill_number(self) -> int:
        """The number of the first chunk on the prefill lane; 0: there is none. Any thread may ask."""
        return self._prefills_collected + 1 if self.prefill else 0

    @property
    def prefill_done(self) -> bool:
        """Whether `collect_prefill` would not wait."""
        return bool(self.prefill) and self.prefill[0].lane.done()

    def launch(self, plan: Plan, work: Work, predicted_ms: float) -> None:
        """Starts a step on the main lane."""
        lane = self.main_lane
        lane.launch(self._build(plan, self._table))
        self.main.append(InFlightStep(lane, "decode" if self.split else "full", plan, work, predicted_ms))

    def launch_prefill(self, split: Split, plan: Plan, on_done: Callable[[], None]) -> None:
        """Starts the prefill lane of `split`, or queues a chunk on it behind the only one."""
        batch = self._build(plan, self._table)
        self.prefill.append(InFlightStep(split.prefill, "prefill", plan, plan.work))
        self.split = split
        split.prefill.launch(batch, on_done)

    def collect(self) -> tuple[InFlightStep, StepResult]:
        """Waits for the first step on the main lane; raises what went wrong in it."""
        return self._collect(self.main)

    def collect_prefill(self) -> tuple[InFlightStep, StepResult]:
        """Waits for the first step on the prefill lane; raises what went wrong in it, and then keeps its pages."""
        collected = self._collect(self.prefill)
        self._prefills_collected += 1
        if not self.prefill:
            self.split = None
        return collected

    def release(self, seq: Sequence, pages: list[int]) -> None:
        """A sequence has ended and leaves these pages, which a step in flight may use."""
        steps = self.prefill if seq.lane_chunks else self.main
        if steps:
            steps[-1].pages.extend(pages)
        else:
            self._pool.release(pages)

    def held_pages(self) -> list[int]:
        """The pages that ended sequences have left to steps."""
        return [page for step in (*self.main, *self.prefill) for page in step.pages]

    def _collect(self, steps: deque[InFlightStep]) -> tuple[InFlightStep, StepResult]:
        result = steps[0].lane.collect()
        step = steps.popleft()
        self._pool.release(step.pages)
        return step, result
