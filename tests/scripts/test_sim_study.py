"""The study's own workload; its policies are tested with the simulator."""

from scripts.sim_study import Cell, compute
from sim.cluster.settings import CompareSettings


def test_a_burst_lengthens_gaps_less_than_with_chunked_prefill() -> None:
    base = CompareSettings(workers=8)
    ours, theirs = (compute(Cell("burst", name, {}), base) for name in ("cost-no-remote", "sglang"))
    assert ours["mean"]["without"] > 0
    assert 1 < ours["p99"]["with"] / ours["p99"]["without"] < theirs["p99"]["with"] / theirs["p99"]["without"]
