"""What can be computed next before the last step has been collected."""

import numpy as np

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.colocation import PrefillBudget
from cpd.performance.model import Work
from engine.scheduling.plan import Chunk, Plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState


def overlapped_decodes(scheduler: Scheduler, step: Plan, now: float = 0.0) -> Plan:
    """Plans the decodes after a step in flight, whatever tokens it samples, and takes the pages that they need.

    Returns:
        An empty plan if something else must be decided first, or nothing is left to compute.
    """
    if step.prefills or any(chunk.num_samples != 1 or len(chunk.choices) > 1 for chunk in step.decodes):
        return Plan()
    if scheduler.may_start(now):
        return Plan()
    running = [(i, chunk.seq) for i, chunk in enumerate(step.decodes) if chunk.seq.state is SequenceState.RUNNING]
    if len(running) != len(scheduler.on_main_lane):  # another sequence joins the batch
        return Plan()
    going_on = [(i, seq) for i, seq in running if not _ends_next(scheduler, seq)]
    if any(_looks_back(seq) for _, seq in going_on):
        return Plan()
    full = [seq for _, seq in going_on if seq.num_pages * BLOCK_SIZE == seq.num_tokens]
    if not going_on or not scheduler.add_page_to_each(full):
        return Plan()
    return Plan(
        [Chunk(seq, seq.num_tokens, 1, 1, seq.choices) for _, seq in going_on],
        token_sources=np.array([i for i, _ in going_on], np.int32),
    )


def next_lane_chunk(scheduler: Scheduler, step: Plan, decodes: Work, budget: PrefillBudget) -> Plan:
    """Plans the chunk after one in flight on the prefill lane: more of the same prompt.

    Args:
        decodes: The decodes to which `budget` applies.

    Returns:
        An empty plan if the prompt ends in `step`, has been aborted, or has so little left that it fits into the
        decodes' batch; also if running sequences lack pages, because the prompt may have to give up its own.
    """
    plan = Plan()
    missing_pages = sum(seq.num_pages * BLOCK_SIZE < seq.num_tokens for seq in scheduler.running)
    if missing_pages > scheduler.pool.available:
        return plan
    for chunk in step.chunks:
        seq, left = chunk.seq, chunk.seq.num_tokens - chunk.end
        if chunk.num_samples or seq.state is not SequenceState.RUNNING:
            continue
        if not budget.mixed.fits(decodes, Work.prefill(left, chunk.end)):
            plan.add(seq, chunk.end, min(left, budget.lane_chunk))
    return plan


def _ends_next(scheduler: Scheduler, seq: Sequence) -> bool:
    """True if the next token is the last one, whatever it is."""
    request = seq.request
    most = min(request.prompt_len + request.params.max_tokens, scheduler.table.max_len)
    return request.prefill_only or seq.num_tokens + 1 >= most


def _looks_back(seq: Sequence) -> bool:
    """True if the token after the next one can't be sampled before that one is known."""
    request = seq.request
    return request.params.looks_back(seq.num_tokens + 1 - request.prompt_len)
