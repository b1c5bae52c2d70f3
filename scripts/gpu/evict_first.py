"""Do evict-first loads in a decode help the GEMM that runs beside it?

The two run on disjoint SMs but share the L2 cache: bytes that a decode reads once evict bytes that a prefill's GEMM
reads again. One SM partition runs a kernel that streams pages, as a decode does, the other a prefill's GEMM. The pages
are read with plain loads, streaming loads (`__ldcs`), and an evict-first L2 policy.
"""

import statistics

from engine.execution.cuda.driver import CudaDriver, Driver
from engine.execution.cuda.greenctx import GreenContexts
from engine.execution.cuda.setup import DECODE_SHARES
from scripts.gpu.common import require_cuda
from scripts.gpu.probes import Policy, Probes
from scripts.gpu.results import Report, Target
from scripts.gpu.streams import Load, alone_ms, beside_ms
from scripts.gpu.workloads import Gemm, PageReads

ROWS = (512, 2048, 8192)
ROUNDS = 3


def check(report: Report, reads: PageReads) -> None:
    """Checks that each kind of load reads the right numbers."""
    for policy in Policy:
        reads.with_policy(policy)()
        report.add(f"wrong pages, {policy.name.lower()}", reads.wrong_sums(), "pages", target=Target(at_most=0))


def measure(report: Report, driver: Driver, share: float, reads: PageReads, gemms: dict[int, Gemm]) -> None:
    """Measures every GEMM beside every kind of load, at one split."""
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
                # Alternate, because clocks and temperature drift.
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
    """Runs the experiment."""
    device = require_cuda()
    driver = CudaDriver()
    reads = PageReads(Probes.build(device), device)
    check(report, reads)
    gemms = {rows: Gemm(device, rows) for rows in ROWS}
    for share in DECODE_SHARES:
        measure(report, driver, share, reads, gemms)
