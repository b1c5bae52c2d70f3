"""Split plans against brute force, and on a published case."""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf

import pytest

from cpd.performance.model import PerfModel, Profile, ShareProfile, StepCost, Work
from cpd.performance.split import (
    Curve,
    Device,
    LaneLoad,
    NoSplitError,
    SplitShares,
    Workload,
    lane_split,
    lane_splits,
    plan_split,
    prepared_splits,
)

H200 = Device(units=132, step=8, minimum=8)


def curve(times: dict[int, float]) -> Curve:
    return lambda units: times[int(units)]


def brute_force(workloads: Sequence[Workload], device: Device) -> float:
    """Returns the shortest time over every partition into stages and every division of the device."""
    return min(
        sum(best_stage(stage, device) for stage in stages)
        for stages in partitions(list(workloads))
        if sum(any(w.limit_ms < inf for w in stage) for stage in stages) <= 1
    )


def partitions(items: list[Workload]) -> Iterator[list[list[Workload]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def best_stage(stage: Sequence[Workload], device: Device) -> float:
    sizes = [size for size in range(1, device.units + 1) if size >= device.minimum]
    best = inf
    for shares in product(sizes, repeat=len(stage)):
        idle = device.units - sum(shares)
        odd = [size for size in shares if size % device.step]
        # One part need not be a multiple of the step: it gets the remainder.
        if idle < 0 or len(odd) > 1 or (odd and idle % device.step):
            continue
        times = [w.total_ms(share, together=len(stage) > 1) for w, share in zip(stage, shares, strict=True)]
        best = min(best, max(times))
    return best


def random_workload(rng: random.Random, name: str, units: int) -> Workload:
    """Makes times that fall with the units, fall and level off, or are random."""
    kind = rng.choice(["compute", "memory", "anything"])
    scale, enough = rng.uniform(1, 100), rng.uniform(0.1, 1) * units

    def ms(u: int) -> float:
        return {
            "compute": scale * units / u,
            "memory": scale * max(1.0, enough / u),
            "anything": scale * rng.uniform(0.5, 2) * units / u,
        }[kind]

    alone = {u: ms(u) for u in range(1, units + 1)}
    together = {u: t * rng.uniform(1, 1.5) for u, t in alone.items()} if rng.random() < 0.5 else None
    limit = rng.uniform(0.5, 4) * scale if rng.random() < 0.3 else inf
    return Workload(name, rng.randint(1, 5), curve(alone), curve(together) if together else None, limit)


def test_plans_are_as_good_as_brute_force_finds_on_a_thousand_random_cases() -> None:
    rng = random.Random(0)
    impossible = several_stages = remainders = 0
    for _ in range(1000):
        units = rng.randint(2, 11)
        device = Device(units, step=rng.randint(1, min(3, units)), minimum=rng.randint(1, min(3, units)))
        workloads = [random_workload(rng, f"w{i}", units) for i in range(rng.randint(1, 4))]
        expected = brute_force(workloads, device)
        if expected == inf:
            impossible += 1
            with pytest.raises(NoSplitError, match="keeps the limit"):
                plan_split(workloads, device)
            continue
        plan = plan_split(workloads, device)
        assert plan.ms == pytest.approx(expected)
        assert plan.bound_ms <= plan.ms * (1 + 1e-9)
        assert sorted(name for stage in plan.stages for name in stage.units) == sorted(w.name for w in workloads)
        by_name = {w.name: w for w in workloads}
        for position, stage in enumerate(plan.stages):
            assert sum(stage.units.values()) <= units
            together = len(stage.units) > 1
            assert stage.ms == max(by_name[name].total_ms(u, together=together) for name, u in stage.units.items())
            assert position == 0 or all(by_name[name].limit_ms == inf for name in stage.units)
            remainders += any(u % device.step for u in stage.units.values())
        several_stages += len(plan.stages) > 1
    assert min(impossible, several_stages, remainders) > 50


def published_kernels(compute_ms: float, saturated_at: float) -> list[Workload]:
    """100 kernels each on 132 SMs: one scales with the SMs, the other is bound by memory, which few SMs saturate."""
    memory_ms = 4717 - compute_ms  # one stream: one after the other
    return [
        Workload("compute", 100, lambda units: compute_ms / 100 * 132 / units),
        Workload("memory", 100, lambda units: memory_ms / 100 * max(1.0, saturated_at / units)),
    ]


@pytest.mark.parametrize(("compute_ms", "saturated_at"), [(2668, 55.0), (2455, 62.3), (2241, 68.3)])
def test_the_published_two_kernel_case_is_reproduced(compute_ms: float, saturated_at: float) -> None:
    # Measured on an H200: 4717 ms in one stream, 4446 in two, 3522 in two Green Contexts. The times of the two
    # kernels alone are not published; these curves reproduce the other figure on 100, 92 and 84 SMs.
    plan = plan_split(published_kernels(compute_ms, saturated_at), H200)
    (stage,) = plan.stages
    assert plan.ms == pytest.approx(3522, rel=0.03)
    assert abs(stage.units["compute"] - 132 * compute_ms / 3522) <= 8
    assert sum(stage.units.values()) == 132
    assert plan.ms <= 1.03 * plan.bound_ms


def test_kernels_of_one_kind_gain_nothing_from_a_split() -> None:
    plan = plan_split([Workload(name, 10, lambda units: 132 / units) for name in "ab"], H200)
    assert plan.ms == pytest.approx(20)
    assert plan.bound_ms == pytest.approx(20)


def test_a_limit_keeps_a_workload_from_waiting() -> None:
    prefill = Workload("prefill", 1, lambda units: 1000 * 132 / units, together=lambda units: 1500 * 132 / units)
    decode = Workload("decode", 10, lambda units: 30 * 132 / units)
    assert len(plan_split([prefill, decode], H200).stages) == 2  # together is slower
    limited = Workload("decode", 10, decode.alone, limit_ms=100)
    plan = plan_split([prefill, limited], H200)
    assert "decode" in plan.stages[0].units
    assert limited.alone(plan.stages[0].units["decode"]) <= 100
    both = Workload("prefill", 1, prefill.alone, prefill.together, limit_ms=3000)
    assert len(plan_split([both, limited], H200).stages) == 1
    with pytest.raises(NoSplitError, match="limit of decode"):
        plan_split([prefill, Workload("decode", 1, lambda units: 30.0, limit_ms=20)], H200)


def test_the_bound_is_reached_by_a_single_workload() -> None:
    plan = plan_split([Workload("memory", 7, lambda units: max(10.0, 600 / units))], H200)
    assert plan.ms == plan.bound_ms == 70


def test_invalid_arguments_are_refused() -> None:
    work = Workload("a", 1, lambda units: 1.0)
    for workloads in ([], [work, work], [Workload(str(i), 1, lambda units: 1.0) for i in range(11)]):
        with pytest.raises(ValueError, match="different names"):
            plan_split(workloads, H200)
    for step, minimum in ((0, 1), (133, 1), (1, 0), (1, 133)):
        with pytest.raises(ValueError, match="no parts"):
            Device(132, step, minimum)


def test_a_device_is_divided_at_every_step_with_the_remainder_on_either_side() -> None:
    assert lane_splits(Device(2)) == [SplitShares(prefill=1, decode=1)]
    assert lane_splits(Device(1)) == []
    assert lane_splits(Device(20, step=8, minimum=8)) == [SplitShares(12, 8), SplitShares(8, 12)]
    splits = lane_splits(H200)
    assert [split.decode for split in splits] == sorted({*range(8, 125, 8), *range(12, 125, 8)})
    assert all(split.prefill + split.decode == 132 for split in splits)


def test_prefill_gets_the_most_units_within_decodes_target() -> None:
    splits = lane_splits(H200)
    decode = curve({u: max(10.0, 600 / u) for u in range(1, 133)})
    for target in (10, 12, 15, 20, 40):
        split = lane_split(LaneLoad(lambda units: 132 / units, decode, target), splits)
        assert decode(split.decode) <= target
        assert all(decode(smaller.decode) > target for smaller in splits if smaller.decode < split.decode)


def test_decode_is_fastest_if_no_split_is_within_its_target() -> None:
    decode = curve({u: max(10.0, 600 / u) for u in range(1, 133)})
    split = lane_split(LaneLoad(lambda units: 132 / units, decode, 9), lane_splits(H200))
    assert split == SplitShares(prefill=72, decode=60)  # it never gets faster than 10 ms


def test_a_split_follows_the_performance_model() -> None:
    def part(share: float) -> ShareProfile:  # decode is flat from half of the device on, prefill scales
        decode = StepCost(tokens=(1,), tokens_ms=(10 * max(1.0, 0.5 / share),), slowdown=1.2)
        return ShareProfile(share=share, decode=decode, prefill=StepCost(tokens=(1, 1001), tokens_ms=(0, 100 / share)))

    shares = (0.25, 0.5, 0.75, 1.0)
    model = PerfModel(Profile(source="roofline", device="d", model="m", shares=tuple(part(s) for s in shares)))
    device = Device(16)
    prefill, decode = Work.prefill(512), Work.decode(8, 8000)
    relaxed, tight = (
        lane_split(LaneLoad.predicted(model, device, prefill, decode, target), lane_splits(device))
        for target in (18.1, 12.1)
    )
    assert (relaxed.decode, tight.decode) == (6, 8)  # 1.2 x 10 ms x 8/6 = 16; x 8/5 = 19.2


def random_loads(rng: random.Random, count: int) -> list[LaneLoad]:
    loads = []
    for _ in range(count):
        decode_ms, enough = rng.uniform(5, 30), rng.uniform(8, 100)
        decode = curve({u: decode_ms * max(1.0, enough / u) for u in range(1, 133)})
        loads.append(LaneLoad(lambda units: 132 / units, decode, decode_ms * rng.uniform(1, 3)))
    return loads


def test_prepared_splits_keep_the_targets_and_cost_little() -> None:
    splits, loads = lane_splits(H200), random_loads(random.Random(1), 40)
    free = [lane_split(load, splits) for load in loads]
    slowdowns = []
    for count in (1, 2, 3):
        prepared = prepared_splits(loads, splits, count)
        assert len(prepared) == count
        chosen = [lane_split(load, prepared) for load in loads]
        assert all(load.decode_ms(split.decode) <= load.target_ms for load, split in zip(loads, chosen, strict=True))
        slowdowns.append(sum(best.prefill / split.prefill for best, split in zip(free, chosen, strict=True)) / 40)
    assert slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[2] < 1.15
    assert prepared_splits(loads, splits[:2], 5) == splits[:2]


def test_without_loads_the_first_splits_are_prepared_and_no_split_is_refused() -> None:
    splits = lane_splits(H200)
    assert prepared_splits([], splits, 2) == splits[:2]
    with pytest.raises(ValueError, match="empty"):
        lane_split(random_loads(random.Random(0), 1)[0], [])
