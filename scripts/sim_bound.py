"""Computes an upper bound for all policies on the base mix: `python -m scripts.sim_bound [--seeds 0,1,2]`.

The bound is the highest rate at which the devices can do the work of the measured requests in the measured time,
assuming that no device waits, only new prompt tokens are computed, weights are read for prompts only, and both lanes
are always busy. Decodes of earlier requests in that time balance those of late requests after it.

    lanes     prompts and decodes share devices, with the best split
    serial    they alternate, or have their own devices
    95 %      the same without the 5 % of the requests with the longest prompts
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import PerfModel, Profile, Work
from sim.cluster.settings import CompareSettings
from sim.cluster.work import DECODES, PROMPTS, decodes_s, prompts_s
from sim.cluster.worker import VOCAB_SIZE
from sim.cluster.workload import Mix
from sim.device.runner import SimulatedRunner, VirtualTime

TOKEN_S = 0.025
"""Time between two tokens of an answer; it only determines when the next turn comes."""

Mode = tuple[float, float]
"""Seconds of prompt work and of decode work (on a whole device) that a device does in a second."""


def needs(settings: CompareSettings, model: PerfModel, rate: float) -> Iterator[Mode]:
    """Device seconds of the prompt and of the decodes of each measured request, in large batches."""
    end_s = settings.warmup + settings.duration
    mix = Mix(rate, settings.long_share, settings.agent_share, settings.seed, settings.max_model_len)
    for session in mix.sessions():
        if session.start_s > end_s:
            return
        due_s, known = session.start_s, session.shared
        before = 0
        for turn in session.turns:
            due_s += turn.pause_s
            tokens = before + len(turn.token_ids)
            cached = known // BLOCK_SIZE * BLOCK_SIZE
            if settings.warmup <= due_s <= end_s:
                prompt = Work(tokens - cached, pairs=Work.prefill(tokens - cached, cached).pairs)
                decode = Work.decode(1, tokens + turn.output_len // 2)
                yield prompts_s(model, prompt), turn.output_len * decodes_s(model, decode)
            before = known = tokens + turn.output_len
            due_s += turn.output_len * TOKEN_S


def modes(model: PerfModel, *, lanes: bool) -> list[Mode]:
    """The modes in which a device can run."""
    found: list[Mode] = [(1.0, 0.0), (0.0, 1.0)]
    prompt, decode = Work(1024), Work.decode(1, 4096)
    for split in SimulatedRunner(1, model, VirtualTime(), VOCAB_SIZE).splits if lanes else ():
        shares = split.shares
        prompts = prompts_s(model, prompt) / prompts_s(model, prompt, shares.prefill, DECODES)
        decodes = decodes_s(model, decode) / decodes_s(model, decode, shares.decode, PROMPTS)
        found.append((prompts, decodes))
    return found


def devices(prompts_s: float, decodes_s: float, ways: Sequence[Mode]) -> float:
    """Devices needed for this work per second. The best mixture has at most two modes."""
    fewest = prompts_s + decodes_s
    for (a, b), (c, d) in combinations(ways, 2):
        if area := a * d - b * c:
            first, second = (prompts_s * d - decodes_s * c) / area, (decodes_s * a - prompts_s * b) / area
            if min(first, second) >= 0:
                fewest = min(fewest, first + second)
    return fewest


def highest_rate(settings: CompareSettings, model: PerfModel, ways: Sequence[Mode], left_out: float) -> float:
    """The highest rate within the devices' capacity, to one percent."""
    low, high = 20.0, 1_000.0
    while high > 1.01 * low:
        rate = (low * high) ** 0.5
        served = sorted(needs(settings, model, rate))
        served = served[: len(served) - int(left_out * len(served))]
        prompts_s, decodes_s = (sum(part[kind] for part in served) / settings.duration for kind in (0, 1))
        if devices(prompts_s, decodes_s, ways) > settings.workers:
            high = rate
        else:
            low = rate
    return low


def main() -> None:
    """Computes and prints the bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2", help="seeds of the mix")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds before requests are measured")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds in which requests are measured")
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        settings = CompareSettings(warmup=options.warmup, duration=options.duration, seed=seed)
        model = PerfModel(Profile.load(settings.profile))
        for name, lanes in (("lanes", True), ("serial", False)):
            ways = modes(model, lanes=lanes)
            whole, most = (highest_rate(settings, model, ways, left_out) for left_out in (0.0, 0.05))
            print(f"seed {seed}, {name}: {whole:.0f} requests/s, 95 %: {most:.0f}", flush=True)


if __name__ == "__main__":
    main()
