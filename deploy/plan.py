"""`cpd plan`: shows the planner's last decision."""

import sys
import time
from datetime import datetime

import orjson
from rich.console import Console
from rich.table import Table

from cpd.common.errors import CPDError
from cpd.planner.report import PlanReport
from deploy.cluster_status import read_cluster
from deploy.remote import running_cluster

ROWS = 12
"""Number of predictions shown: those around the present and the planned number."""


def show_plan(cluster: str, as_json: bool) -> None:
    """Prints what the planner of a running cluster sees, predicts and has decided.

    Raises:
        CPDError: No cluster of this name is running, none of its routers answers, or it has no planner.
    """
    answer = read_cluster(running_cluster(cluster))
    plan: PlanReport | None = answer.get("plan")
    if plan is None and answer.get("planner"):
        raise CPDError(f"the planner of cluster '{cluster}' has decided nothing yet; try again in some seconds")
    if plan is None:
        raise CPDError(f"cluster '{cluster}' has no planner: start it with --planner advise or --planner act")
    if as_json:
        sys.stdout.write(orjson.dumps(plan, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    console = Console()
    for part in describe(plan, alive=answer["planner"], now=time.time()):
        console.print(part, markup=False, highlight=False)


def describe(plan: PlanReport, *, alive: bool, now: float) -> list[str | Table]:
    """Returns what to print about a plan at a time in seconds since 1970."""
    current, planned, workers = plan["current"], plan["prefill_workers"], plan["workers"]
    does = "changes roles" if plan["mode"] == "act" else "only advises"
    lines: list[str | Table] = [f"The planner {does}. It decided {max(0.0, now - plan['at']):.0f} s ago:"]
    if not alive:
        lines = [f"The planner is away. It decided {max(0.0, now - plan['at']):.0f} s ago, the last time:"]
    decision = "they stay" if planned == current else f"{planned} should"
    lines.append(f"{current} of {workers} workers prefill, {decision}: {plan['reason']}")
    if plan["size_reason"]:
        lines.append(f"Workers that should run: {plan['wanted_workers']} ({plan['size_reason']})")
    if plan["demands"]:
        lines += ["", _demands(plan)]
    if plan["predictions"]:
        ago = max(0.0, now - plan["predicted_at"])
        lines += ["", f"Predicted {ago:.0f} s ago, for {plan['scale']:g} times the measured load:", _predictions(plan)]
    if plan["changes"]:
        lines += ["", f"Changes: {plan['changes_total']}, the last ones:"]
    for change in plan["changes"]:
        at = datetime.fromtimestamp(change["at"]).strftime("%H:%M:%S")
        names = f" ({', '.join(change['workers'])})" if change["workers"] else ""
        error = f"; {change['error']}" if change["error"] else ""
        lines.append(f"{at}  {change['before']} to {change['after']}{names}: {change['reason']}{error}")
    return lines


def _demands(plan: PlanReport) -> Table:
    table = _table("requests/s", "prompt tokens", "uncached", "by a prefill worker", "output tokens")
    for one in sorted(plan["demands"], key=lambda one: -one["rate"]):
        tokens = (one["prompt_tokens"], one["local_tokens"], one["remote_tokens"], one["output_tokens"])
        table.add_row(f"{one['rate']:.2f}", *(f"{count:,.0f}" for count in tokens))
    return table


def _predictions(plan: PlanReport) -> Table:
    table = _table("prefill", "good requests/s", "share", "prefill busy", "combined busy", "streams")
    middle = (plan["current"] + plan["prefill_workers"]) // 2
    nearest = sorted(plan["predictions"], key=lambda one: abs(one["prefill_workers"] - middle))[:ROWS]
    for one in sorted(nearest, key=lambda one: one["prefill_workers"]):
        shares = (one["good_share"], one["prefill_busy"], one["combined_busy"])
        cells = [f"{one['good_per_s']:.2f}", *(f"{share:.0%}" for share in shares), f"{one['streams']:.1f}"]
        table.add_row(str(one["prefill_workers"]), *cells)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
