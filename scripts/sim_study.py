"""Studies the routing policy in simulation: `python -m scripts.sim_study --out DIRECTORY [--parts base,mixes]`.

    base        the highest rate within the targets: our policy and two baselines, for every seed of --seeds
    wrong       the same for more policies with 5 % noise, and predictions wrong by each of ERRORS
    settings    the same for other settings of each policy; `CHOSEN` has the best ones
    ablations   our policy, each time without one feature
    mixes       ten mixes from all short to all long
    cache       cached share and balance, beside the policy that always takes the most cached worker
    trace       goodput on the requests of --trace, replayed at each of --speedups; with 5 % noise, and 20 % error
    planner     goodput of overloads with each of STARTS prefill workers, and with a planner that starts from there;
                also of --trace at each of --speedups, if given
    day         good requests in each eighth of a day, with each of SPLITS of the workers, and with a planner
    misjudged   one of 8 workers has a profile that is wrong by each of FACTORS: its share of the requests
    burst       16 prompts of 4,096 tokens into 128 running streams

A cell is one policy under one workload. It is computed once and stored in a file, so that an interrupted study resumes.
At the end all stored cells are shown. The profile determines how far the results can be trusted (docs/simulator.md).
"""

import argparse
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson

from bench.metrics import request_row
from bench.record import Record
from bench.slo import Slo
from cpd.performance.model import Profile
from sim.cluster.compare import as_row, search_rate
from sim.cluster.mistakes import scaled
from sim.cluster.settings import CompareSettings
from sim.cluster.simulation import SimCluster
from sim.cluster.workload import Session, Turn, Workload, make_workload
from sim.evidence import evidence

CHOSEN: dict[str, dict[str, Any]] = {
    "sglang": {},
    "static-pd": {"prefill_workers": 11},
    "cost": {"prefill_workers": 4},
}
"""The best settings on the base mix (part `settings`). The other mixes use them too."""

TRIED: dict[str, list[dict[str, Any]]] = {
    "sglang": [{"token_budget": tokens} for tokens in (512, 2048)],
    "static-pd": [{"prefill_workers": number} for number in (9, 10, 12)],
    "cost": [{"prefill_workers": number} for number in (0, 6, 8)],
}

ABLATIONS: tuple[str, ...] = (
    "cost-no-lanes",
    "cost-no-remote",
    "cost-no-fetch",
    "cost-no-cache",
    "cost-no-interference",
    "cost-no-queue",
)

MIXES: tuple[tuple[float, dict[str, Any]], ...] = (
    (2800.0, {"long_share": 0.0, "agent_share": 0.0}),
    (900.0, {"long_share": 0.0, "agent_share": 1.0}),
    (870.0, {"long_share": 0.02, "agent_share": 0.5}),
    (400.0, {"long_share": 0.05, "agent_share": 0.5}),
    (250.0, {"long_share": 0.1, "agent_share": 0.0}),
    (220.0, {"long_share": 0.1, "agent_share": 1.0}),
    (135.0, {"long_share": 0.2, "agent_share": 0.5}),
    (56.0, {"long_share": 0.4, "agent_share": 0.5}),
    (32.0, {"long_share": 0.7, "agent_share": 0.5}),
    (24.0, {"long_share": 1.0, "agent_share": 0.5}),
)
"""Mixes, each with a rate in requests a second that is too much for 16 workers."""

CACHE_RATE = 60.0
"""Rate of the part `cache`, in requests a second, which even `most-cached` sustains."""

TRACE_POLICIES: tuple[tuple[str, int], ...] = (
    ("cost", 0), ("cost", 4), ("sglang", 0), ("sglang-lanes", 0), ("dynamo", 0), ("static-pd", 8)
)  # fmt: skip
"""Policies of the part `trace`, with their numbers of prefill workers."""

ERRORS = (0.2, 0.5)

FACTORS = (1 / 3, 1.0, 3.0)
"""Durations by the profile of the misjudged worker, relative to the true ones."""

MISJUDGED = "worker-0"
SHARE_S = 15.0
"""Shares of requests are counted over this time."""

WRONG_POLICIES: tuple[tuple[str, int], ...] = (
    ("cost", 4), ("cost", 0), ("sglang-lanes", 0), ("static-pd", 9), ("static-pd", 11)
)  # fmt: skip
"""Policies of the part `wrong`, with their numbers of prefill workers."""

STARTS = (0, 1, 4, 8, 11)
"""Numbers of prefill workers of the part `planner`."""

OVERLOADS: tuple[tuple[float, dict[str, Any]], ...] = (
    (200.0, {"long_share": 0.1, "agent_share": 0.5}),
    *reversed(MIXES),
)
"""Rates and mixes of the part `planner`: the base mix, then the others, those with few requests first."""

PLANNED_REQUESTS = 6000
"""Measured requests of a cell of the part `planner`, if --duration allows; but at least 10 s."""

SPLITS = (0.0, 0.0625, 0.25, 0.5, 0.6875)
"""Shares of prefill workers in the part `day`."""

DAY_RATE = 25.0
"""Chats at their peak in the part `day`, in requests a second for each worker."""

STREAMS, STREAM_TOKENS = 128, 2000
BURST_S, BURST_PROMPTS, BURST_TOKENS = 3.0, 16, 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one workload.

    Attributes:
        part: Part of the study.
        settings: Changes to the study's settings.
        rate: Rate in requests a second; None searches the highest.
    """

    part: str
    policy: str
    settings: dict[str, Any]
    rate: float | None = None

    @property
    def name(self) -> str:
        """Name of its file, without the suffix."""
        return "_".join([self.part, self.policy, *(f"{key}-{value}" for key, value in sorted(self.settings.items()))])


class Burst(Workload):
    """Streams that decode, and `prompts` prompts at one moment."""

    def __init__(self, *, prompts: int) -> None:
        self._prompts = prompts

    def sessions(self) -> Iterator[Session]:
        for number in range(STREAMS):
            yield Session(number / STREAMS, [_turn(512, number, STREAM_TOKENS)])
        for number in range(self._prompts):
            yield Session(BURST_S, [_turn(BURST_TOKENS, 1000 + number, 16)])


def _turn(tokens: int, number: int, output_len: int) -> Turn:
    return Turn(array("i", np.random.default_rng(number).integers(100_000, size=tokens).tolist()), output_len)


def cells(part: str, seeds: Sequence[int], speedups: Sequence[float], base: CompareSettings) -> Iterator[Cell]:
    """The cells of one part."""
    wrong = {"step_noise": 0.05, "profile_error": 0.2}
    match part:
        case "base":
            for seed in seeds:
                for policy, chosen in CHOSEN.items():
                    yield Cell(part, policy, {**chosen, "seed": seed})
        case "wrong":
            for seed, error in product(seeds, ERRORS):
                for policy, prefill_workers in WRONG_POLICIES:
                    settings = {"prefill_workers": prefill_workers, "seed": seed}
                    yield Cell(part, policy, {**settings, "step_noise": 0.05, "profile_error": error})
        case "settings":
            for policy, tried in TRIED.items():
                yield from (Cell(part, policy, {**CHOSEN[policy], **other}) for other in tried)
        case "ablations":
            yield from (Cell(part, policy, CHOSEN["cost"]) for policy in ABLATIONS)
        case "mixes":
            for _, mix in MIXES:
                yield from (Cell(part, policy, {**chosen, **mix}) for policy, chosen in CHOSEN.items())
        case "cache":
            policies: tuple[str, ...] = ("cost", "cost-no-remote", "most-cached")
            for policy in policies:
                yield Cell(part, policy, CHOSEN["cost"], CACHE_RATE)
        case "trace":
            for speedup in speedups:
                for policy, prefill_workers in TRACE_POLICIES:
                    replay: dict[str, Any] = {"workload": "trace", "speedup": speedup}
                    replay |= {"prefill_workers": prefill_workers, "step_noise": 0.05, "profile_error": 0.2}
                    yield Cell(part, policy, replay, speedup)
        case "planner":
            loads = [*OVERLOADS]
            if base.file is not None:
                loads += [(speedup, {"workload": "trace", "speedup": speedup}) for speedup in speedups]
            for (rate, load), seed, start, planner in product(loads, seeds, STARTS, ("off", "act")):
                changes = {**load, **wrong, "seed": seed, "prefill_workers": start, "planner": planner}
                if "workload" not in load:  # of a trace, the rate is a speed
                    changes["duration"] = max(10.0, min(base.duration, PLANNED_REQUESTS / rate))
                yield Cell(part, "cost", changes, rate)
        case "day":
            for seed, error in product(seeds, ERRORS):
                day: dict[str, Any] = {**wrong, "workload": "day", "profile_error": error, "seed": seed}
                day |= {"warmup": base.day_s / 8, "duration": base.day_s}
                for share, planner in (*((share, "off") for share in SPLITS), (0.0, "act")):
                    changes = {**day, "prefill_workers": int(share * base.workers), "planner": planner}
                    yield Cell(part, "cost", changes, DAY_RATE * base.workers)
        case "misjudged":
            chats: dict[str, Any] = {"workers": 8, "prefill_workers": 0, "agent_share": 0.0}
            chats |= {"warmup": 0.0, "duration": 75.0, "step_noise": 0.05}
            for seed, factor in product(seeds, FACTORS):
                yield Cell(part, "cost", {**chats, "seed": seed, "factor": factor}, 60.0)
        case "burst":
            yield from (Cell(part, policy, chosen) for policy, chosen in CHOSEN.items())


def compute(cell: Cell, base: CompareSettings) -> dict[str, Any]:
    """Computes the content of a cell's file."""
    if cell.part == "misjudged":
        return _shares(cell, base)
    policy = base.policy.model_copy(update={"name": cell.policy})
    settings = base.model_copy(update={**cell.settings, "policy": policy})
    if cell.part == "burst":
        with_burst, without = (_gaps(settings, prompts) for prompts in (BURST_PROMPTS, 0))
        return {
            "mean": _rise(fmean(without), fmean(with_burst)),
            "p99": _rise(float(np.percentile(without, 99)), float(np.percentile(with_burst, 99))),
            "max": _rise(max(without), max(with_burst)),
        }
    if cell.part == "day":
        return _day(settings, cell)
    if cell.part == "planner":
        return _planned(settings, cell)
    if cell.rate is None:
        row = search_rate(settings)
    else:
        outcome = SimCluster(settings, make_workload(settings, cell.rate)).run()
        row = as_row(settings, cell.rate, outcome)
    return row.model_dump(mode="json")


def _shares(cell: Cell, base: CompareSettings) -> dict[str, Any]:
    """Requests of the misjudged worker in each period, relative to a fair share; the least and most of the others."""
    changes = {**cell.settings}
    factor = changes.pop("factor")
    settings = base.model_copy(update=changes)

    def believed(name: str, profile: Profile) -> Profile:
        return scaled(profile, factor) if name == MISJUDGED else profile

    assert cell.rate is not None
    outcome = SimCluster(settings, make_workload(settings, cell.rate), believed).run()
    edges = np.arange(0, settings.duration + SHARE_S, SHARE_S)
    shares = {}
    for worker in sorted({record.worker for record in outcome.records}):
        shares[worker] = np.histogram([one.due_s for one in outcome.records if one.worker == worker], edges)[0]
    mean = sum(shares.values()) / settings.workers
    own = (shares.pop(MISJUDGED) / mean).round(2)
    others = np.array(list(shares.values())) / mean
    return {
        "good": outcome.good / len(outcome.records),
        "share": own.tolist(),
        "least": others.min(axis=0).round(2).tolist(),
        "most": others.max(axis=0).round(2).tolist(),
    }


def _planned(settings: CompareSettings, cell: Cell) -> dict[str, Any]:
    """Requests and good ones a second, and each number of prefill workers with the time at which it began."""
    assert cell.rate is not None
    cluster = SimCluster(settings, make_workload(settings, cell.rate))
    good = cluster.judge()
    return {
        "offered": len(cluster.records) / settings.duration,
        "good": good / settings.duration,
        "prefill": [[0.0, settings.prefill_workers], *([at, plan.prefill_workers] for at, plan in cluster.changes)],
    }


def _day(settings: CompareSettings, cell: Cell) -> dict[str, Any]:
    """Good requests that arrived in each eighth of the measured time, and the number of changes."""
    assert cell.rate is not None
    cluster = SimCluster(settings, make_workload(settings, cell.rate))
    cluster.judge()
    slo = Slo(ttft=settings.slo_ttft, itl=settings.slo_itl)
    answered = [one for one in cluster.records if one.ended_s]
    due_s = [one.due_s - settings.warmup for one in answered if request_row(one, 0.0, slo).good]
    good = np.histogram(due_s, np.linspace(0, settings.duration, 9))[0]
    return {"offered": len(cluster.records), "good": good.tolist(), "changes": len(cluster.changes)}


def _rise(without: float, with_burst: float) -> dict[str, float]:
    return {"without": without, "with": with_burst, "rise": with_burst / without - 1}


def _gaps(settings: CompareSettings, prompts: int) -> list[float]:
    """Gaps between the tokens of the running streams in the second after the burst, in ms."""
    settings = settings.model_copy(update={"warmup": 0.0, "duration": BURST_S - 1})
    records: list[Record] = SimCluster(settings, Burst(prompts=prompts)).run().records
    return [
        1e3 * (after - before)
        for record in records
        for before, after in zip(record.content_s, record.content_s[1:], strict=False)
        if BURST_S <= after <= BURST_S + 1
    ]


def show(directory: Path, base: CompareSettings) -> None:
    """Prints all stored cells."""
    print(evidence(base.profile))
    for path in sorted(directory.glob("*.json")):
        found = orjson.loads(path.read_bytes())
        if path.stem.startswith("burst"):
            print(
                path.stem,
                *(
                    f"{name} {ms['without']:.2f} -> {ms['with']:.2f} ms ({ms['rise']:+.1%})"
                    for name, ms in found.items()
                ),
            )
        elif path.stem.startswith(("misjudged", "day", "planner")):
            print(path.stem, *(f"{name} {value}" for name, value in found.items()))
        elif found["max_rate"]:
            figures = {name: value for name, value in found.items() if isinstance(value, float)}
            print(path.stem, *(f"{name} {value:.4g}" for name, value in figures.items()))
        else:
            print(path.stem, "not within the targets")


def main() -> None:
    """Computes the missing cells and shows all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--parts", default="base,cache,burst,ablations,mixes,settings", help="parts to compute")
    parser.add_argument("--seeds", default="0,1,2", help="seeds of the parts with several")
    parser.add_argument("--profile", default="h200-qwen3-8b", help="profile of the devices")
    parser.add_argument("--rate-from", type=float, default=40.0, help="rate at which a search begins")
    parser.add_argument("--workers", type=int, default=16, help="number of workers")
    parser.add_argument("--warmup", type=float, default=15.0, help="seconds before requests are measured")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds in which requests are measured")
    parser.add_argument("--precision", type=float, default=0.05, help="relative precision of the highest rate")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--speedups", default="8,12,17,20", help="how many times faster the trace is replayed")
    parser.add_argument("--day-s", type=float, default=480.0, help="part `day`: seconds that a day takes")
    options = parser.parse_args()
    base = CompareSettings(
        workers=options.workers,
        warmup=options.warmup,
        duration=options.duration,
        precision=options.precision,
        rate_from=options.rate_from,
        profile=options.profile,
        file=options.trace,
        day_s=options.day_s,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    speedups = [float(speedup) for speedup in options.speedups.split(",")]
    for part in options.parts.split(","):
        for cell in cells(part, seeds, speedups, base):
            path = options.out / f"{cell.name}.json"
            if not path.exists():
                content = orjson.dumps(compute(cell, base), option=orjson.OPT_INDENT_2)
                path.write_bytes(content + b"\n")
                print(cell.name, flush=True)
    show(options.out, base)


if __name__ == "__main__":
    main()
