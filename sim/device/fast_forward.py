"""Fast-forward: many decode steps of an engine at once, without planning each of them.

A step that only samples the next token of each sequence changes nothing else, except where a sequence needs a page or
has completed a block, once in 16 steps. The engine knows nothing of this: a `FastForward` gives the tokens to the
engine's scheduler and output processor, as the steps would have done.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import repeat

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Work
from engine.engine import Engine
from engine.scheduling.plan import Chunk
from engine.trace import RECENT_STEPS
from engine.types import StepOutput

Choose = Callable[[int, int, Collection[int], int], list[int]]
"""A sequence's last token, its length, its stop tokens, a number of steps -> its next tokens, no stop tokens."""


def possible_steps(engine: Engine) -> int:
    """Number of the next steps that can be made at once; 0 if the next step must be a step of the engine.

    In these steps each sequence that is not on the prefill lane gets its next token, there are pages for all of them,
    and no sequence ends before the last step. They must not be made beyond a change of the engine from outside, or the
    end of a chunk on the prefill lane.
    """
    scheduler = engine.scheduler
    if engine.has_results or not scheduler.running or scheduler.num_waiting:
        return 0
    decoding, max_len = scheduler.on_main_lane, scheduler.table.max_len
    steps = scheduler.pool.available // len(scheduler.running) * BLOCK_SIZE if decoding else 0
    for seq in decoding:
        request, known = seq.request, seq.num_tokens
        params = request.params
        if known - seq.num_computed != 1 or request.prefill_only or not seq.first_token_sent:
            return 0
        if params.top_logprobs is not None:
            return 0
        steps = min(steps, request.prompt_len + params.max_tokens - known, max_len - known)
    return steps


def next_work(engine: Engine) -> Work:
    """The work of the next step if it only decodes."""
    decoding = engine.scheduler.on_main_lane
    return Work.decode(len(decoding), sum(seq.num_tokens for seq in decoding))


class FastForward:
    """The next steps of an engine. Nothing else may be done with the engine until `end`.

    Pages and cached blocks are those after the last step made.

    Args:
        steps: Maximum number of steps, at most `possible_steps`.
        choose: Chooses the tokens.

    Attributes:
        work: The work of the first step.
    """

    def __init__(self, engine: Engine, steps: int, choose: Choose) -> None:
        self._engine = engine
        self._choose = choose
        self._seqs = engine.scheduler.on_main_lane
        self._chosen: list[list[int]] = [[] for _ in self._seqs]
        self.work = next_work(engine)
        # The coming steps after which a sequence needs a page (False) or has completed a block (True).
        changes: list[tuple[int, bool, int]] = []
        for column, known in enumerate(seq.num_tokens for seq in self._seqs):
            changes += [(step, False, column) for step in range(-(known - 1) % BLOCK_SIZE, steps, BLOCK_SIZE)]
            changes += [(step, True, column) for step in range(-known % BLOCK_SIZE, steps, BLOCK_SIZE)]
        self._changes = sorted(changes, reverse=True)

    def next_change(self) -> int | None:
        """Number of steps, from the first one, after which pages or blocks change next; None if they don't."""
        return self._changes[-1][0] + 1 if self._changes else None

    def advance(self, steps: int) -> None:
        """Makes the first `steps` steps, as far as pages and blocks go."""
        while self._changes and self._changes[-1][0] < steps:
            step, _, column = self._changes.pop()
            self._extend(column, step + 1)

    def end(self, ms: Sequence[float]) -> StepOutput:
        """Makes one step for each duration in `ms`, and no more. Returns the outputs of all steps together."""
        self.advance(len(ms))
        for column in range(len(self._seqs)):
            self._extend(column, len(ms))
        self._record(ms)
        outputs = self._engine.outputs
        return StepOutput([outputs.decoded(seq, chosen) for seq, chosen in zip(self._seqs, self._chosen, strict=True)])

    def _extend(self, column: int, steps: int) -> None:
        """Gives a sequence the tokens, pages and blocks of the first `steps` steps."""
        chosen, seq, scheduler = self._chosen[column], self._seqs[column], self._engine.scheduler
        count = steps - len(chosen)
        if count <= 0:
            return
        last = chosen[-1] if chosen else int(scheduler.table.rows[seq.row][seq.num_tokens - 1])
        more = self._choose(last, seq.num_tokens, seq.request.params.stop_token_ids, count)
        while seq.num_pages * BLOCK_SIZE < seq.num_computed + count:
            if not scheduler.add_page_to_each([seq]):
                raise AssertionError("there are no pages for these steps")
        chunk = Chunk(seq, seq.num_computed, count, count, seq.choices)
        scheduler.append(seq, more)
        scheduler.commit(chunk, count)
        chosen += more

    def _record(self, ms: Sequence[float]) -> None:
        """Records the durations of the last steps. Steps that take no time are not compared with the prediction."""
        engine, recent = self._engine, ms[-RECENT_STEPS:]  # the durations of earlier steps would be forgotten
        predicted_ms = self._predicted_ms(len(ms) - len(recent), len(ms)) if any(ms) else repeat(0.0)
        for step_ms, step_predicted_ms in zip(recent, predicted_ms, strict=False):
            engine.times.add(step_ms, step_predicted_ms, decodes=True)

    def _predicted_ms(self, first: int, end: int) -> Iterator[float]:
        in_flight, seqs, context = self._engine.in_flight, self.work.seqs, self.work.context
        for step in range(first, end):
            work = Work.decode(seqs, context + step * seqs)
            yield self._engine.colocation.model.step_ms(work, in_flight.main_lane.share, in_flight.prefill_work)
