"""Measures a rough profile from a few steps, for workers that start without a profile."""

from itertools import accumulate
from typing import Any

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Profile, ShareProfile, StepCost
from engine.execution.executor import Executor
from engine.profile.lanes import decodes_during_prefill, prefills_during_decodes
from engine.profile.steps import RunStep, Step, StepBatches, step_timer

_RUNS = 3

_LANE_RUNS = 5
"""Runs of a step of which only the ratio to another one counts."""

_LONG_MS = 200.0
"""A longer step runs only once."""

_ROUNDS_MS = 500.0
"""Rounds of all steps go on until their sum is this: other work on the machine, which disturbs a step, comes and goes
within tenths of a second, and the best time of each step counts."""

_MAX_ROUNDS = 20

_DECODES = (1, 8)
_CHUNKS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)
_CONTEXT = 512
"""Tokens of the context with which decodes are measured. On CPUs its attention takes longer than the linear layers of
small models."""

_MIN_PREFILL = 64
"""Fewer tokens take a CPU as long on half its cores, since reading the weights bounds them. So if no longer prefill is
measured, lanes are not."""

_SHORT = 256
"""The pairs of queries and keys, which a rough profile omits, matter in longer chunks. They are measured only if the
device is below full speed with this one: otherwise any prompt would seem to take as long as reading the weights."""

_FULL_SPEED = 0.9
"""At full speed, time / previous time >= this · tokens / previous tokens."""

_ENOUGH_MS = 100.0
"""Chunks larger than the first one that takes longer than this are not measured."""


def measure_rough_profile(runner: Executor, max_len: int, **labels: Any) -> Profile:
    """Times decodes and prefills on the whole device and on its lanes, in about a second.

    Args:
        runner: Runner that nothing else uses.
        max_len: Tokens of the longest sequence.
        labels: Other fields of the profile: at least `device` and `model`.
    """
    run = step_timer(runner.full, StepBatches(runner))
    run(Step.decode(1, 1))  # warm-up
    longest = min(max_len, runner.num_pages * BLOCK_SIZE)
    decodes = _times(run, {size: Step.decode(size, 1) for size in _DECODES if size <= runner.num_pages})
    chunks = _times(run, {size: Step.prefill(size) for size in _CHUNKS if size <= longest})
    seqs, last = max(decodes), max(chunks)
    decode = Step.decode(seqs, min(_CONTEXT, max_len, runner.num_pages // 2 // seqs * BLOCK_SIZE or 1))
    context_ms = max(0.0, _fastest(run, decode) - decodes[seqs]) / decode.work.context
    # Longer chunks are as fast as the last: a line through the last two would guess their speed from a difference.
    chunks[2 * last] = 2 * max(chunks.values())
    whole = ShareProfile(share=1, decode=_cost(decodes, context_ms), prefill=_cost(chunks, context_ms))
    shares = *_lanes(runner, whole, decode, Step.prefill(last)), whole
    return Profile(schema="cpd-profile/1", source="measured", shares=shares, **labels)


def _lanes(runner: Executor, whole: ShareProfile, decode: Step, prefill: Step) -> list[ShareProfile]:
    """Measures how many times as long a decode and a prefill take on each lane, alone and beside the other lane.

    Returns:
        Costs of each share; nothing if the device can't be split, or if the steps can't tell. Then time on a share is
        assumed to scale.
    """
    if prefill.work.tokens < _MIN_PREFILL or decode.pages + prefill.pages > runner.num_pages:
        return []
    batches, steps = StepBatches(runner), (decode, prefill)
    lanes = {round(lane.share, 6): lane for split in runner.splits for lane in (split.prefill, split.decode)}
    whole_ms = [_fastest(step_timer(runner.full, batches), step) for step in steps]
    alone_ms = {share: [_fastest(step_timer(lane, batches), step) for step in steps] for share, lane in lanes.items()}
    slowdowns = {share: [1.0, 1.0] for share in lanes}
    for split in runner.splits:
        with decodes_during_prefill(split, batches.make(prefill), StepBatches(runner, skip=prefill.pages)) as run:
            share = round(split.decode.share, 6)
            slowdowns[share][0] = _fastest(run, decode) / alone_ms[share][0]
        with prefills_during_decodes(split, batches.make(decode), StepBatches(runner, skip=decode.pages)) as run:
            share = round(split.prefill.share, 6)
            slowdowns[share][1] = _fastest(run, prefill) / alone_ms[share][1]
    return [
        ShareProfile(
            share=share,
            decode=_scaled(whole.decode, alone_ms[share][0] / whole_ms[0], slowdowns[share][0]),
            prefill=_scaled(whole.prefill, alone_ms[share][1] / whole_ms[1], slowdowns[share][1]),
        )
        for share in sorted(lanes)
    ]


def _cost(times: dict[int, float], context_ms: float) -> StepCost:
    """Makes the cost of steps from times of some that attend to their own tokens only."""
    curve = accumulate((max(0.0, ms - tokens * context_ms) for tokens, ms in times.items()), max)
    return StepCost(tokens=tuple(times), tokens_ms=tuple(curve), context_ms=context_ms)


def _scaled(cost: StepCost, factor: float, slowdown: float) -> StepCost:
    return StepCost(
        tokens=cost.tokens,
        tokens_ms=tuple(factor * ms for ms in cost.tokens_ms),
        context_ms=factor * cost.context_ms,
        slowdown=slowdown,
    )


def _fastest(run: RunStep, step: Step) -> float:
    """Returns the shortest time of a few runs."""
    best = run(step)
    for _ in range(_LANE_RUNS - 1):
        if best < _LONG_MS:
            best = min(best, run(step))
    return best


def _times(run: RunStep, steps: dict[int, Step]) -> dict[int, float]:
    """Returns the time of each step in ms, up to the first that is long enough."""
    times: dict[int, float] = {}
    for tokens, step in steps.items():
        if tokens > _SHORT and _at_full_speed(times):
            break
        times[tokens] = run(step)
        for _ in range(_RUNS - 1):
            if times[tokens] < _LONG_MS:
                times[tokens] = min(times[tokens], run(step))
        if times[tokens] > _ENOUGH_MS:
            break
    for _ in range(min(_MAX_ROUNDS, int(_ROUNDS_MS / max(sum(times.values()), 1e-6)))):
        times = {tokens: min(ms, run(steps[tokens])) for tokens, ms in times.items()}
    return times


def _at_full_speed(times: dict[int, float]) -> bool:
    (fewer, fewer_ms), (more, more_ms) = list(times.items())[-2:]
    return more_ms / fewer_ms >= _FULL_SPEED * more / fewer
