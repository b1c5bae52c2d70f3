"""`cpd sim run`: simulates one policy under one load."""

import sys
from datetime import UTC, datetime

from rich.console import Console

from bench.metrics import summarise
from bench.report.html import write_html
from bench.report.table import show
from bench.result import Client, Result
from bench.run import command_line, versions
from bench.slo import Slo
from sim.cluster.settings import SimSettings
from sim.cluster.simulation import Outcome, SimCluster
from sim.cluster.workload import make_workload
from sim.evidence import evidence


def run(settings: SimSettings) -> None:
    """Simulates, writes the files and prints the report.

    Raises:
        CPDError: The settings contradict each other, or a file cannot be read or written.
    """
    outcome = SimCluster(settings, make_workload(settings, settings.rate)).run()
    result = as_result(settings, outcome)
    if settings.json_file:
        result.save(settings.json_file)
    if settings.html_file:
        write_html([result], settings.html_file)
    console = Console()
    show(result, console)
    for time_s, plan in outcome.changes:
        console.print(
            f"{time_s:.0f} s: prefill workers: {plan.prefill_workers} instead of {plan.current}: {plan.reason}"
        )
    work, requests, steps = outcome.work_imbalance, outcome.imbalance, outcome.step_imbalance
    console.print(
        f"Imbalance (maximum over mean): device time of all workers {work:.2f}; of the combined workers, requests "
        f"{requests:.2f} and decode step times {steps:.2f}"
    )


def as_result(settings: SimSettings, outcome: Outcome) -> Result:
    """Returns the result in the form that `cpd bench` reads."""
    slo = f"ttft={settings.slo_ttft:g},itl={settings.slo_itl:g}"
    summary, requests = summarise(outcome.records, start_s=settings.warmup, slo=Slo.parse(slo), offered_per_s=None)
    load = f"speedup {settings.speedup:g}" if settings.workload == "trace" else f"{settings.rate:g} requests/s"
    return Result(
        label=f"simulated {settings.policy.name} {settings.workload} {load}",
        command=command_line(sys.argv),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        settings={**settings.model_dump(mode="json"), "slo": slo},
        seed=settings.seed,
        interrupted=False,
        simulated=True,
        cluster_before=None,
        cluster_after=None,
        client=Client(
            limited=False,
            reasons=[],
            warnings=[evidence(settings.profile)],
            processes=0,
            cpu_share=0.0,
            loop_lag_ms_p50=0.0,
            loop_lag_ms_p99=0.0,
            machine_share=0.0,
            machine_idle=0.0,
            selftest=None,
        ),
        summary=summary,
        requests=requests,
    )
