"""Which running streams move away from a worker that is too slow or too full, and where they go. Pure.

The gain of moving a stream from a worker S to a worker T is the delay that it saves all streams, in ms:

    gain_ms = left · (itl_ms - new_itl_ms)          this stream's next tokens come sooner
            + left · (requests - 1) · shorter_ms    steps of the streams that stay on S get shorter
            + preempted_ms                          if S is full: this stream would be preempted, wait until another
                                                    one ends, left · itl_ms / requests, and be computed again
            - left · T.requests · longer_ms         steps of the streams on T get longer
            - T.decodes · delay_ms                  they wait while T computes the tokens after the last full block
            - pause_ms                              the stream stands still: messages, T's queue, pages, that prefill

`left` is the expected number of tokens still to come: what is missing to the tenant's mean answer, but at least as many
as the stream has already, since an answer that is long will probably be longer. Step times are predictions that follow
each worker's own measurements (`worker_load.py`).

S is *slow* for a stream if its steps take at least SLOW times as long as those of T with this stream. S is *full* if
its pages will not last all its streams for another `horizon_tokens`. T must not become full itself, must have a free
batch slot, and must keep the ITL target. A stream that has moved does not go back at once: S would have to be the
faster one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from math import inf
from typing import Literal, NamedTuple

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.common.policy_settings import PolicySettings
from router.placement.candidate import Candidate
from router.placement.policy import Targets

SLOW = 1.25
"""A stream moves because of speed only if its steps take at least this times as long as they would elsewhere."""

PATIENCE_S = 0.5
"""A worker must have been slow or full in all its load reports for this long before a stream moves, in seconds."""

FASTEST_S = 0.25
"""Time for which it is remembered how fast the fastest worker is, in seconds."""

LOOK_S = 0.05
"""Time between close looks at a worker that stays slow or full, in seconds: a look takes time for each stream."""

SPARE = 2
"""Where streams move to, pages last this many times as long as on a worker that counts as full."""

STREAMS, TARGETS = 4, 4
"""Number of streams, and of workers for each, that are predicted in full at a time: the most promising ones."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A running stream.

    Attributes:
        key: Identifies it for the caller.
        tokens: Tokens of prompt and output so far.
        emitted: Those of the output.
        max_tokens: Upper bound on `emitted`.
        expected_output: Tokens that an answer usually has.
    """

    key: int
    tokens: int
    emitted: int
    max_tokens: int
    expected_output: int

    @property
    def left(self) -> int:
        """Expected number of tokens still to come."""
        return min(self.max_tokens - self.emitted, max(self.expected_output - self.emitted, self.emitted, 1))

    @property
    def pages(self) -> int:
        """Its KV pages."""
        return blocks_for(self.tokens)


class Move(NamedTuple):
    """A stream that moves.

    Attributes:
        target: The worker it moves to.
        reason: What is wrong with the worker that it leaves.
        itl_ms, new_itl_ms: Gap between its tokens, here and there.
        gain_ms: See the module.
    """

    key: int
    target: str
    reason: Literal["slow", "full"]
    itl_ms: float
    new_itl_ms: float
    gain_ms: float

    def describe(self) -> str:
        """The reason, for people to read."""
        return f"its worker is {self.reason} ({self.itl_ms:.1f} ms between tokens, {self.new_itl_ms:.1f} ms there)"


class Moves:
    """Finds streams to move, and remembers since when workers have been slow or full.

    Args:
        targets: What the operator asks of placements; the ITL target holds for moves, too.
    """

    def __init__(self, targets: Targets, settings: PolicySettings) -> None:
        self._targets = targets
        self._settings = settings
        self._since: dict[str, float] = {}
        self._next_looks: dict[str, float] = {}
        self._fastest_ms = 0.0
        self._fastest_until = -inf

    def suspicious(self, worker: Candidate, workers: Callable[[], Sequence[Candidate]], now: float) -> bool:
        """Cheap test, False for most workers. If it is False, `find` would find nothing, or was just asked.

        Args:
            workers: Returns the workers that take requests.
        """
        if now >= self._fastest_until:
            self._fastest_ms = min((one.grown_step_ms(0) for one in workers()), default=0.0)
            self._fastest_until = now + FASTEST_S
        if worker.all_decode_ms < SLOW * self._fastest_ms and self._lasts(worker, 1):
            self.forget(worker.worker_id)
            return False
        if now < self._next_looks.get(worker.worker_id, -inf):
            return False
        self._next_looks[worker.worker_id] = now + LOOK_S
        return True

    def find(
        self, worker: Candidate, streams: Sequence[Stream], others: Sequence[Candidate], now: float
    ) -> Move | None:
        """Returns the next stream to move from a worker, if one should.

        Args:
            streams: Those that may move.
            others: The workers that they may move to.
            now: Time in seconds, of the clock of `Candidate.idle_at`.
        """
        move = self._best(worker, streams, others, now)
        if move is None:
            self._since.pop(worker.worker_id, None)
            return None
        since = self._since.setdefault(worker.worker_id, now)
        return move if now - since >= PATIENCE_S else None

    def forget(self, worker_id: str) -> None:
        """A worker must be slow or full for PATIENCE_S again: it has changed, or a stream that left it came back."""
        self._since.pop(worker_id, None)
        self._next_looks.pop(worker_id, None)

    def _best(
        self, worker: Candidate, streams: Sequence[Stream], others: Sequence[Candidate], now: float
    ) -> Move | None:
        # the most tokens left for each page that must be transferred
        promising = nlargest(STREAMS, streams, key=lambda stream: stream.left / stream.pages)
        near = nsmallest(TARGETS, others, key=lambda one: (one.added_stream_ms, one.worker_id))
        for stream in promising:
            if found := [move for one in near if (move := self._move(worker, stream, one, now)) is not None]:
                return max(found, key=lambda move: move.gain_ms)
        return None

    def _move(self, worker: Candidate, stream: Stream, target: Candidate, now: float) -> Move | None:
        """Predicts a move; None if it is not allowed, or does not pay."""
        itl_ms, new_itl_ms = worker.all_decode_ms, target.grown_step_ms(stream.tokens)
        full, slow = not self._lasts(worker, 1), itl_ms >= SLOW * new_itl_ms
        if not (full or slow) or target.batch_slot_ms(1, 1) or not self._lasts(target, SPARE, stream):
            return None
        if 0 < self._targets.slo_itl_ms < new_itl_ms:
            return None
        left = stream.left
        shorter_ms = max(0.0, itl_ms - worker.grown_step_ms(stream.tokens, -1)) if worker.requests > 1 else 0.0
        longer_ms = max(0.0, new_itl_ms - target.all_decode_ms)
        prefill = target.prefill(BLOCK_SIZE, stream.tokens)
        wait_ms = target.wait_ms(BLOCK_SIZE, stream.tokens, now)
        handoff_ms = self._settings.handoff_ms + target.overhead_ms
        gain_ms = left * (itl_ms - new_itl_ms)
        gain_ms += left * (worker.requests - 1) * shorter_ms
        if full:
            gain_ms += left * itl_ms / worker.requests + worker.prefill(stream.tokens, 0).ms
        gain_ms -= left * target.requests * longer_ms
        gain_ms -= target.decodes * prefill.delay_ms
        gain_ms -= handoff_ms + wait_ms + target.transfer_ms(stream.pages) + prefill.ms
        reason: Literal["slow", "full"] = "slow" if slow else "full"
        return Move(stream.key, target.worker_id, reason, itl_ms, new_itl_ms, gain_ms) if gain_ms > 0 else None

    def _lasts(self, worker: Candidate, times: int, newcomer: Stream | None = None) -> bool:
        """True if the pages of a worker last all its streams, and a newcomer, for `times` times `horizon_tokens`."""
        if not worker.num_pages:
            return True
        growth = times * blocks_for(self._settings.horizon_tokens)
        needed = growth * worker.requests
        if newcomer is not None:
            needed += newcomer.pages + growth
        return worker.free_pages + worker.cached_pages >= needed
