"""The scheduler: which tokens a step computes.

There are no phases: every sequence has `num_computed` tokens and catches up with `num_tokens`. Running sequences go
before waiting ones, and those with one token to compute before those with more. Among themselves, older ones go first.
How many tokens the others may have, and where, is for others to say (`cpd.colocation.Room`); who of those who wait may
start, for `engine/admission.py`.
"""

import numpy as np

from cpd.blocks import BLOCK_SIZE
from cpd.colocation import Room
from engine.admission import Admission
from engine.live import LiveSequences
from engine.plan import Chunk, Plan
from engine.sequence import Seq, State


class Scheduler:
    """Plans steps.

    Args:
        live: Whose tokens they compute.
        admission: Lets more of them start.
    """

    def __init__(self, live: LiveSequences, admission: Admission) -> None:
        self._live = live
        self._admission = admission
        self._behind: list[Seq] = []
        self._nobody_else = False  # could start when that was last tried, and nothing has happened since

    def decodes(self) -> Plan:
        """Begins a step: one token of each running sequence that lacks just one. Preempts for the pages they need."""
        singles: list[Chunk] = []
        behind: list[Seq] = []
        running = State.RUNNING
        for seq in tuple(self._live.running):
            if seq.state is not running or seq.aside:  # preempted for an older one, or busy
                continue
            known, computed = seq.num_tokens, seq.num_computed
            if seq.num_pages * BLOCK_SIZE < known and not self._live.grow(seq):
                continue
            if known - computed == 1:
                singles.append(Chunk(seq, computed, 1, seq.choices, True))
            else:
                behind.append(seq)
        self._behind = behind
        return Plan(singles)

    def decodes_after(self, step: Plan, now: float = 0.0) -> Plan | None:
        """The decodes after those of a step that is being computed, whatever tokens that chooses.

        Takes the pages that they need. None: something else is to be decided first, or there is nothing to compute.
        """
        if step.longer or any(not chunk.samples or len(chunk.choices) > 1 for chunk in step.singles):
            return None
        if self._admission.next_in_line(now) is not None and not self._nobody_else:
            return None
        running = [(index, chunk) for index, chunk in enumerate(step.singles) if chunk.seq.state is State.RUNNING]
        if len(running) != sum(not seq.aside for seq in self._live.running):  # somebody else is to come in
            return None
        going_on = [(index, chunk) for index, chunk in running if not self._ends(chunk.seq)]
        if any(chunk.seq.request.params.looks_back for _, chunk in going_on):
            return None
        short = [chunk.seq for _, chunk in going_on if chunk.seq.num_pages * BLOCK_SIZE == chunk.seq.num_tokens]
        own = self._live.pool.take(len(short))
        if own is None or not going_on:
            return None
        for seq, page in zip(short, own, strict=True):
            self._live.table.add_pages(seq, [page])
        return Plan(
            [Chunk(chunk.seq, chunk.start + 1, 1, chunk.seq.choices, samples=True) for _, chunk in going_on],
            fed=np.array([index for index, _ in going_on], np.int32),
        )

    def wants_prefill(self, now: float = 0.0) -> bool:
        """Whether `prefills` may find something to do."""
        return bool(self._behind) or self._admission.next_in_line(now) is not None

    def prefills(self, step: Plan, room: Room, now: float = 0.0) -> Plan:
        """Adds prefills to the step that `decodes` began, as far as there is room, and admits and parks accordingly.

        Args:
            now: Whose turn it is depends on the time.

        Returns:
            What goes to the prefill lane.
        """
        self._nobody_else = False
        aside = Plan()
        along, beside, left = room.along, room.beside, room.aside
        while along > 0 or left:
            longest = self._live.table.max_len if left or room.cut else along
            seq = self._next_behind(longest) or self._admission.admit_next(longest, now)
            if seq is None:
                self._nobody_else = True
                break
            count = seq.num_tokens - seq.num_computed
            if count <= along or room.cut:
                count = min(count, along)
                step.add(seq, seq.num_computed, count)
                along, beside = along - count, beside - count
                if beside < 0:
                    left = 0  # this batch wants the whole device
            else:
                count = min(count, left)
                aside.add(seq, seq.num_computed, count)
                along, left = min(along, beside), left - count
        return aside

    def look_again(self) -> None:
        """Something has happened by which somebody may start who could not."""
        self._nobody_else = False

    def prefill_after(self, step: Plan, room: Room) -> Plan:
        """The next chunk on the prefill lane after one that it computes: more of the same prompt.

        Nothing where the prompt ends in `step`, or has been ended, or what is left of it may ride along; and while
        sequences lack pages that are not there: the prompt may have to give its own up.
        """
        plan = Plan()
        if sum(seq.num_pages * BLOCK_SIZE < seq.num_tokens for seq in self._live.running) > self._live.pool.available:
            return plan
        for chunk in step.chunks:
            seq, start = chunk.seq, chunk.start + chunk.count
            if not chunk.samples and seq.state is State.RUNNING and seq.num_tokens - start > room.along:
                plan.add(seq, start, min(seq.num_tokens - start, room.aside))
        return plan

    def first_in_line(self, now: float = 0.0) -> Seq | None:
        """Who can't go on or start, when the plan is empty."""
        return self._live.running[0] if self._live.running else self._live.line.first(now)

    @property
    def quiet_steps(self) -> int:
        """So many steps from now on each do no more than to choose the next token of each sequence that is not aside.

        Nobody waits, nobody ends before the last of them but by a stop token, and there are pages for all of them.
        Whatever else can happen comes from outside, or from what is aside.
        """
        running = self._live.running
        if not running or self._live.line or self._live.pending.num_waiting:
            return 0
        most, decoding = self._live.table.max_len, self._live.decoding
        steps = self._live.pool.available // len(running) * BLOCK_SIZE if decoding else 0
        for seq in decoding:
            request, known = seq.request, seq.num_tokens
            params = request.params
            if known - seq.num_computed != 1 or request.prefill_only or not seq.reported:
                return 0
            if params.top_logprobs is not None:
                return 0
            steps = min(steps, request.prompt_len + params.max_tokens - known, most - known)
        return steps

    def _ends(self, seq: Seq) -> bool:
        """Whether the next token is the last one, whatever it is."""
        request = seq.request
        most = min(request.prompt_len + request.params.max_tokens, self._live.table.max_len)
        return request.prefill_only or seq.num_tokens + 1 >= most

    def _next_behind(self, longest: int) -> Seq | None:
        """Takes the next running sequence out that lacks no more tokens than `longest`."""
        for index, seq in enumerate(self._behind):
            if seq.num_tokens - seq.num_computed <= longest:
                return self._behind.pop(index)
        return None
