"""Prometheus metrics of the planner, from its last report; docs/metrics.md describes them."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch.roster import Roster


class PlannerMetrics(Collector):
    """Reads the report at every scrape. Without a live planner there are no series."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def collect(self) -> Iterable[Metric]:
        number = GaugeMetricFamily("cpd_planner_prefill_workers", "Prefill workers.", labels=["which"])
        changes = CounterMetricFamily("cpd_planner_changes", "Changes of the number of prefill workers.")
        plan = self._roster.plan
        if plan is not None and self._roster.plans:
            number.add_metric(["planned"], plan["prefill_workers"])
            number.add_metric(["present"], plan["current"])
            changes.add_metric([], plan["changes_total"])
        yield from (number, changes)
