"""What can be computed next before the last step has been collected, or without looking at each step."""

import numpy as np

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.colocation import PrefillBudget
from engine.scheduling.plan import Chunk, Plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState


def overlapped_decodes(scheduler: Scheduler, step: Plan, now: float = 0.0) -> Plan | None:
    """The decodes after a step that is in flight, whatever tokens that chooses. Takes the pages that they need.

    None: something else is to be decided first, or there is nothing to compute.
    """
    if step.prefills or any(not chunk.num_samples or len(chunk.choices) > 1 for chunk in step.decodes):
        return None
    if scheduler.may_start(now):
        return None
    running = [(i, chunk.seq) for i, chunk in enumerate(step.decodes) if chunk.seq.state is SequenceState.RUNNING]
    if len(running) != len(scheduler.decoding):  # another sequence joins the batch
        return None
    going_on = [(i, seq) for i, seq in running if not _ends_next(scheduler, seq)]
    if any(seq.request.params.looks_back for _, seq in going_on):
        return None
    full = [seq for _, seq in going_on if seq.num_pages * BLOCK_SIZE == seq.num_tokens]
    if not going_on or not scheduler.add_page_to_each(full):
        return None
    return Plan(
        [Chunk(seq, seq.num_tokens, 1, 1, seq.choices) for _, seq in going_on],
        token_sources=np.array([i for i, _ in going_on], np.int32),
    )


def next_lane_chunk(scheduler: Scheduler, step: Plan, budget: PrefillBudget) -> Plan:
    """The chunk after one that is in flight on the prefill lane: more of the same prompt.

    Nothing where the prompt ends in `step`, has been aborted, or has no more left than fits into the decodes' batch;
    nor while running sequences lack pages, because the prompt may have to give its own up.
    """
    plan = Plan()
    lacking = sum(seq.num_pages * BLOCK_SIZE < seq.num_tokens for seq in scheduler.running)
    if lacking > scheduler.pool.available:
        return plan
    for chunk in step.chunks:
        seq, left = chunk.seq, chunk.seq.num_tokens - chunk.end
        if not chunk.num_samples and seq.state is SequenceState.RUNNING and left > budget.mixed:
            plan.add(seq, chunk.end, min(left, budget.lane_chunk))
    return plan


def uneventful_steps(scheduler: Scheduler) -> int:
    """How many of the next steps only choose the next token of each sequence that is not on the prefill lane.

    No sequence waits, none ends before the last of these steps unless by a stop token, and there are pages for all of
    them. Whatever else can happen comes from outside, or from the prefill lane.
    """
    if not scheduler.running or scheduler.num_waiting:
        return 0
    decoding, max_len = scheduler.decoding, scheduler.table.max_len
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


def _ends_next(scheduler: Scheduler, seq: Sequence) -> bool:
    """Whether the next token is the last one, whatever it is."""
    request = seq.request
    most = min(request.prompt_len + request.params.max_tokens, scheduler.table.max_len)
    return request.prefill_only or seq.num_tokens + 1 >= most
