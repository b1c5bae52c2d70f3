"""The prefill that is computed aside, on the prefill lane, while decode steps go on.

    idle ──launch──▶ running ──(done: asked between steps, never waited for)──▶ done ──collect──▶ idle, or running:
                        │                                                                         the queued chunk
                        └──launch──▶ running, and the prompt's next chunk queued behind it

A lane that is asked between steps idles for half a step on average before it gets something else. So the next chunk of
the same prompt is launched while one runs, if the split is to stay as it is.

Who owns what while chunks run or are queued, so that nothing which the lane still uses is freed or changed:

| what                        | owner                                       | until                                 |
| pages of its sequences      | the sequences, and beside them `Aside`,     | all have released them                |
|                             | once for each chunk                         |                                       |
| rows of the sequence table  | the sequences; the batch has copies of all  | a sequence ends: it may at any moment |
|                             | but the tokens that sampling looks at       |                                       |
| blocks of a chunk           | the sequence; nobody else finds them        | the chunk's end, when it is collected |
| the batch                   | the lane                                    | the chunk's end                       |
| buffers and workspaces      | the lane                                    | the runner goes                       |

A sequence that is aborted while the lane computes it is gone at once, and what comes out for it is dropped (another one
may have its row by then); only its pages stay until the end of its chunks. A sequence aside is never preempted: whoever
lacks its pages waits for that end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cpd.blocks import blocks_for
from cpd.perfmodel import Work
from engine.batch import Batch, Ran, Split
from engine.plan import BuildBatch, Plan
from engine.pool import BlockPool
from engine.sequence import SeqTable


@dataclass(frozen=True, slots=True)
class Launched:
    """A chunk on the prefill lane.

    Attributes:
        split: Whose prefill lane computes it.
        pages: That the lane uses.
    """

    split: Split
    plan: Plan
    work: Work
    batch: Batch
    pages: list[int]


class Aside:
    """The prefill lane, and what is on it."""

    def __init__(self, pool: BlockPool, table: SeqTable, build: BuildBatch) -> None:
        self._pool = pool
        self._table = table
        self._build = build
        self._launched: deque[Launched] = deque()
        self._collected = 0

    @property
    def under_way(self) -> int:
        """The number of the first chunk that is not collected; 0: there is none. Any thread may ask."""
        return self._collected + 1 if self._launched else 0

    @property
    def split(self) -> Split | None:
        """The split in use, whose other lane is for the decodes; None while there is nothing aside."""
        return self._launched[0].split if self._launched else None

    @property
    def work(self) -> Work | None:
        """What the prefill lane computes; None: nothing."""
        return self._launched[0].work if self._launched else None

    @property
    def last(self) -> Launched | None:
        """What is last on the lane; None: nothing."""
        return self._launched[-1] if self._launched else None

    @property
    def done(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._launched) and self._launched[0].split.prefill.done()

    def launch(self, split: Split, plan: Plan, on_done: Callable[[], None]) -> None:
        """Starts the prefill lane of `split`, or queues a chunk on it behind the only one."""
        pages = [
            page
            for chunk in plan.chunks
            for page in self._table.pages_of(chunk.seq)[: blocks_for(chunk.start + chunk.count)]
        ]
        self._pool.hold(pages)
        for chunk in plan.chunks:
            chunk.seq.aside = True
        launched = Launched(split, plan, plan.work, self._build(plan, self._table), pages)
        self._launched.append(launched)
        split.prefill.launch(launched.batch, on_done)

    def collect(self) -> tuple[Launched, Ran]:
        """Waits for the first chunk. Returns what it computed; raises what went wrong, and then keeps its pages."""
        assert self._launched, "nothing was launched"
        launched = self._launched[0]
        ran = launched.split.prefill.collect()
        self._launched.popleft()
        self._collected += 1
        for chunk in launched.plan.chunks:
            chunk.seq.aside = False
        for queued in self._launched:
            for chunk in queued.plan.chunks:
                chunk.seq.aside = True
        self._pool.release(launched.pages)
        return launched, ran

    def held_pages(self) -> list[int]:
        """The pages that the lane uses; a page as often as it is held."""
        return [page for launched in self._launched for page in launched.pages]
