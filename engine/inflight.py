"""Steps that have been launched but not collected.

    main     the full lane, or the decode lane of a split
             launch N ─▶ launch N + 1, which takes N's tokens where they are ─▶ collect N: ends, outputs, blocks ─▶ …
    prefill  the prefill lane of a split, while it has work
             launch ─▶ launch the prompt's next chunk ─▶ (asked between steps if it is done) ─▶ collect ─▶ …

**Overlap scheduling** (as in SGLang): a lane that works in the background, as a GPU's does, gets step N + 1 before the
tokens of step N are processed. Only decodes of the same sequences overlap (`engine/scheduling/lookahead.py`); if
anything else must be decided, step N is collected first. If a sequence ends with step N or is aborted meanwhile, its
token of step N + 1 is dropped. A prefill lane would be idle for half a decode step on average until the engine asks,
so the prompt's next chunk is launched while one runs, if the split stays the same.

Nothing that a lane still uses is freed or changed:

| what                        | owner                                       | until                                 |
| pages of its sequences      | the sequences; when one ends, the step that | they end; the step is collected       |
|                             | was launched last on its lane               |                                       |
| rows of the sequence table  | the sequences; the batch has copies of all  | a sequence ends, which may be at any  |
|                             | but the tokens that sampling looks at       | moment                                |
| blocks of a chunk           | the sequence; others can't find them        | the step is collected                 |
| the batch                   | the lane                                    | the step ends                         |
| buffers and workspaces      | the lane                                    | the executor is closed                |

An aborted sequence ends at once. Its tokens in flight are dropped (another sequence may have its row by then); its
pages stay until the step is collected. A sequence on the prefill lane is never preempted: sequences that need its pages
wait until the chunk is collected.
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

LaneKind = Literal["full", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step.

    Attributes:
        predicted_ms: Duration by the performance model; 0: unknown.
        pages: Pages that sequences have left by ending since, released when the step is collected.
    """

    lane: Lane
    lane_kind: LaneKind
    plan: Plan
    work: Work
    predicted_ms: float = 0.0
    pages: list[int] = field(default_factory=list)


class InFlight:
    """Launches and collects steps.

    Args:
        full: The lane that is the whole device.
        build: Makes the batches.

    Attributes:
        main: Steps on the full lane or a decode lane, oldest first: two while steps overlap.
        prefill: Steps on a prefill lane, oldest first: two while a chunk is queued.
        split: The split in use; None while the prefill lane is idle.
        before_wait: Called before this thread waits for the device: before it launches a step on the main lane, which
            some lanes compute meanwhile, and before it collects one.
    """

    def __init__(self, full: Lane, pool: BlockPool, table: SequenceTable, build: BuildBatch) -> None:
        self.main: deque[InFlightStep] = deque()
        self.prefill: deque[InFlightStep] = deque()
        self.split: Split | None = None
        self.before_wait: Callable[[], None] = lambda: None
        self._full = full
        self._pool = pool
        self._table = table
        self._build = build
        self._prefills_collected = 0

    @property
    def main_lane(self) -> Lane:
        """The lane for everything that does not go to the prefill lane."""
        return self.split.decode if self.split else self._full

    @property
    def prefill_work(self) -> Work | None:
        """The work of the step that runs on the prefill lane; None if it is idle."""
        return self.prefill[0].work if self.prefill else None

    @property
    def prefill_chunk_number(self) -> int:
        """Number of the first chunk on the prefill lane; 0 if there is none. Any thread may ask."""
        return self._prefills_collected + 1 if self.prefill else 0

    @property
    def prefill_done(self) -> bool:
        """True if `collect_prefill` would return at once."""
        return bool(self.prefill) and self.prefill[0].lane.done()

    def launch(self, plan: Plan, work: Work, predicted_ms: float) -> None:
        """Starts a step on the main lane."""
        lane, batch = self.main_lane, self._build(plan, self._table)
        self.before_wait()
        lane.launch(batch)
        self.main.append(InFlightStep(lane, "decode" if self.split else "full", plan, work, predicted_ms))

    def launch_prefill(self, split: Split, plan: Plan, on_done: Callable[[], None]) -> None:
        """Starts a step on the prefill lane of `split`, or queues it there behind the one that runs."""
        batch = self._build(plan, self._table)
        self.prefill.append(InFlightStep(split.prefill, "prefill", plan, plan.work))
        self.split = split
        split.prefill.launch(batch, on_done)

    def collect(self) -> tuple[InFlightStep, StepResult]:
        """Waits for the first step on the main lane. Raises the step's error if it failed."""
        return self._collect(self.main)

    def collect_prefill(self) -> tuple[InFlightStep, StepResult]:
        """Waits for the first step on the prefill lane. Raises the step's error if it failed, and keeps its pages."""
        collected = self._collect(self.prefill)
        self._prefills_collected += 1
        if not self.prefill:
            self.split = None
        return collected

    def release(self, seq: Sequence, pages: list[int]) -> None:
        """Releases the pages of an ended sequence, once no step in flight uses them."""
        steps = self.prefill if seq.lane_chunks else self.main
        if steps:
            steps[-1].pages.extend(pages)
        else:
            self._pool.release(pages)

    def held_pages(self) -> list[int]:
        """The pages of ended sequences that wait for a step."""
        return [page for step in (*self.main, *self.prefill) for page in step.pages]

    def _collect(self, steps: deque[InFlightStep]) -> tuple[InFlightStep, StepResult]:
        self.before_wait()
        result = steps[0].lane.collect()
        step = steps.popleft()
        self._pool.release(step.pages)
        return step, result
