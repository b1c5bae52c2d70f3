"""The prefill that is computed aside, on the prefill lane, while decode steps go on.

    idle ──launch──▶ running ──(done: asked between steps, never waited for)──▶ done ──collect──▶ idle

Who owns what while a chunk runs, so that nothing which the lane still uses is freed or changed:

| what                        | owner                                       | until                                 |
| pages of its sequences      | the sequences, and beside them `Aside`      | both have released them               |
| rows of the sequence table  | the sequences; the batch has copies of all  | a sequence ends: it may at any moment |
|                             | but the tokens that sampling looks at       |                                       |
| the batch                   | the lane                                    | the chunk's end                       |
| buffers and workspaces      | the lane                                    | the runner goes                       |

A sequence that is aborted while the lane computes it is gone at once, and what comes out for it is dropped (another one
may have its row by then); only its pages stay until the chunk's end. A sequence aside is never preempted: whoever lacks
its pages waits for that end.
"""

from collections.abc import Callable

from cpd.blocks import blocks_for
from engine.batch import Ran, Split
from engine.plan import Plan, build_batch
from engine.pool import BlockPool
from engine.sequence import SeqTable


class Aside:
    """The chunk on the prefill lane, if there is one."""

    def __init__(self, pool: BlockPool, table: SeqTable) -> None:
        self._pool = pool
        self._table = table
        self._pages: list[int] = []
        self.split: Split | None = None
        self.plan = Plan()

    def launch(self, split: Split, plan: Plan, on_done: Callable[[], None]) -> None:
        """Starts the prefill lane of `split`; decodes go to the other one until `collect`."""
        self._pages = [
            page
            for chunk in plan.chunks
            for page in self._table.pages_of(chunk.seq)[: blocks_for(chunk.start + chunk.count)]
        ]
        self._pool.hold(self._pages)
        for chunk in plan.chunks:
            chunk.seq.aside = True
        self.split, self.plan = split, plan
        split.prefill.launch(build_batch(plan, self._table), on_done)

    @property
    def done(self) -> bool:
        """Whether there is something to collect."""
        return self.split is not None and self.split.prefill.done()

    def collect(self) -> tuple[Plan, Ran]:
        """Waits for the lane. Returns what it computed; raises what went wrong in it."""
        assert self.split is not None, "nothing was launched"
        ran = self.split.prefill.collect()
        plan, self.plan, self.split = self.plan, Plan(), None
        for chunk in plan.chunks:
            chunk.seq.aside = False
        self._pool.release(self._pages)
        self._pages = []
        return plan, ran

    def held_pages(self) -> list[int]:
        """The pages that the lane uses."""
        return self._pages
