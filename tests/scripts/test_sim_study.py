"""The study's own workload; its policies are tested with the simulator."""

from scripts.sim_study import Cell, cells, compute
from sim.cluster.settings import CompareSettings


def test_a_burst_lengthens_gaps_less_than_with_chunked_prefill() -> None:
    base = CompareSettings(workers=8)
    ours, theirs = (compute(Cell("burst", name, {}), base) for name in ("cost-no-remote", "sglang"))
    assert ours["mean"]["without"] > 0
    assert 1 < ours["p99"]["with"] / ours["p99"]["without"] < theirs["p99"]["with"] / theirs["p99"]["without"]


def test_a_day_is_counted_by_its_eighths() -> None:
    base = CompareSettings(workers=2, day_s=24.0)
    *static, planned = cells("day", [3], [], base)
    assert {cell.settings["planner"] for cell in static[:5]} == {"off"}
    assert planned.settings["planner"] == "act"
    found = compute(Cell("day", "cost", static[0].settings, 20.0), base)
    assert len(found["good"]) == 8
    assert 0 < sum(found["good"]) <= found["offered"]
    assert found["changes"] == 0


def test_a_planner_is_compared_with_the_numbers_that_it_starts_from() -> None:
    base = CompareSettings(workers=3, warmup=1.0, duration=2.0)
    fixed, planned, *_ = cells("planner", [3], [], base)
    assert (fixed.settings["planner"], planned.settings["planner"]) == ("off", "act")
    found = compute(Cell("planner", "cost", {**fixed.settings, "duration": 2.0}, 8.0), base)
    assert 0 < found["good"] <= found["offered"]
    assert found["prefill"] == [[0.0, 0]]
