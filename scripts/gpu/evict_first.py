"""Does reading a decode's bytes "evict first" help the GEMM that runs beside it?

SMs are split between the two, the L2 cache is not: what a decode reads once pushes out what a prefill's GEMM reads
again. A kernel that streams pages, as a decode does, runs on one part of the device, a prefill's GEMM on the other. The
pages are read by plain loads, by streaming loads (`__ldcs`), and with an L2 policy of evict-first.

Usage: `python -m scripts.gpu.evict_first [--out DIR]`
"""

import statistics
import sys
from collections.abc import Sequence

from engine.execution.cuda.driver import CudaDriver, Driver
from engine.execution.cuda.greenctx import GreenContexts
from scripts.gpu.common import require_cuda, run_experiment
from scripts.gpu.probes import Policy, Probes
from scripts.gpu.results import Report, Target
from scripts.gpu.streams import Load, alone_ms, beside_ms
from scripts.gpu.workloads import Gemm, PageReads

QUESTION = "Does evict-first on a decode's loads help the GEMM beside it?"
ROWS = (512, 2048, 8192)
DECODE_SHARES = (1 / 8, 1 / 4, 1 / 2)
ROUNDS = 3


def check(report: Report, reads: PageReads) -> None:
    """Each kind of load must read the same, right numbers."""
    for policy in Policy:
        reads.with_policy(policy)()
        report.add(f"wrong pages, {policy.name.lower()}", reads.wrong_sums(), "pages", target=Target(at_most=0))


def measure(report: Report, driver: Driver, share: float, reads: PageReads, gemms: dict[int, Gemm]) -> None:
    """One split: every GEMM beside every kind of load."""
    with GreenContexts(driver) as contexts:
        for parts in contexts.prepare([share]):
            where = f"{parts.prefill.sms} + {parts.decode.sms} SMs"
            streams = {policy: Load(parts.decode.stream(), reads.with_policy(policy)) for policy in Policy}
            for policy, load in streams.items():
                ms = alone_ms(load)
                name = f"{where}: pages alone, {policy.name.lower()}"
                report.add(name, reads.bytes / ms / 1e6, "GB/s", note="reads only")
            for rows, gemm in gemms.items():
                work = Load(parts.prefill.stream(), gemm)
                alone = alone_ms(work)
                # In turns, since clocks and temperature drift.
                rounds = [
                    {policy: (beside_ms(work, load), beside_ms(load, work)) for policy, load in streams.items()}
                    for _ in range(ROUNDS)
                ]
                for policy in Policy:
                    gemm_ms, pages_ms = (
                        statistics.median(times[policy][index] for times in rounds) for index in range(2)
                    )
                    name = f"{where}: GEMM of {rows} rows beside pages, {policy.name.lower()}"
                    note = (
                        f"GEMM {gemm_ms:.4g} ms, alone {alone:.4g}; pages at {reads.bytes / pages_ms / 1e6:,.0f} GB/s"
                    )
                    report.add(name, gemm_ms / alone, "x alone", note=note)


def run(report: Report) -> None:
    """See the module."""
    device = require_cuda()
    driver = CudaDriver()
    reads = PageReads(Probes.build(device), device)
    check(report, reads)
    gemms = {rows: Gemm(device, rows) for rows in ROWS}
    for share in DECODE_SHARES:
        measure(report, driver, share, reads, gemms)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    return run_experiment("evict_first", QUESTION, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
