"""Prometheus metrics of the workers, from their load reports; docs/metrics.md describes them.

Workers fill their reports in `worker/load_report.py` and in `add_load` of their `service.py`.
`router/request_metrics.py` has the metrics of requests.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from cpd.rpc import cpd_pb2 as pb
from router.dispatch.workers import Workers

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

PAGE_STATES = ("free", "cached", "used", "reserved", "quarantined")


def pages(load: pb.Load) -> dict[str, int]:
    """The number of pages of a worker's pool, by owner state."""
    return {state: getattr(load, f"{state}_pages") for state in PAGE_STATES}


def _tokens(load: pb.Load) -> dict[str, int]:
    return {"prefill": load.prefill_tokens, "decode": load.decode_tokens, "cached": load.cached_tokens}


_LABELS = ("router", "worker", "role")

_FIELDS: dict[str, tuple[_Family, str]] = {
    "running": (GaugeMetricFamily, "Sequences in the running batch."),
    "waiting": (GaugeMetricFamily, "Requests in the waiting queue."),
    "waiting_tokens": (GaugeMetricFamily, "Prompt tokens to compute."),
    "queued_tokens": (GaugeMetricFamily, "Prompt tokens of requests that were never scheduled."),
    "preemptions": (CounterMetricFamily, "Preempted sequences."),
    "host_pages": (GaugeMetricFamily, "Capacity of host memory, in pages."),
    "host_offloaded_pages": (GaugeMetricFamily, "Evicted pages in host memory."),
}
"""Metrics that are fields of `Load`."""

_LABELLED: dict[str, tuple[_Family, str, str, Callable[[pb.Load], Mapping[str, int]]]] = {
    "pages": (GaugeMetricFamily, "Pages of the KV pool.", "state", pages),
    "tokens": (CounterMetricFamily, "Prompt and output tokens.", "phase", _tokens),
    "remote_prefills": (CounterMetricFamily, "Remote prefills.", "outcome", attrgetter("remote_prefills")),
    "prefix_fetches": (CounterMetricFamily, "Prefix fetches.", "outcome", attrgetter("prefix_fetches")),
    "transfer_failures": (CounterMetricFamily, "Failed transfers.", "reason", attrgetter("transfer_failures")),
    "host_blocks": (CounterMetricFamily, "Evicted blocks.", "event", attrgetter("host_blocks")),
}
"""Metrics with one more label, and their values by that label."""


_RESIDENCY_STATES = {
    "serving": pb.Residency.STATE_SERVING,
    "asleep": pb.Residency.STATE_ASLEEP,
    "waking": pb.Residency.STATE_WAKING,
    "draining": pb.Residency.STATE_DRAINING,
}

_RESIDENCY: dict[str, tuple[str, Callable[[pb.Residency], float]]] = {
    "cpd_worker_wakes": ("Wakes of its model after the first load.", attrgetter("wakes")),
    "cpd_worker_wake_wait_seconds": ("Time in which requests waited for these wakes.", attrgetter("waited_s")),
    "cpd_gpu_cas_conflicts": ("Writes of the device's record that came too late.", attrgetter("cas_conflicts")),
}
"""Counters of workers on shared devices."""


class WorkerMetrics(Collector):
    """Reads the workers' loads at every scrape, so that no value outlives its worker."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        workers = [([self._workers.router_id, worker.id, worker.role], worker) for worker in self._workers.sessions]
        live = GaugeMetricFamily("cpd_worker_live", "1 while requests can be placed on the worker.", labels=_LABELS)
        ttft = SummaryMetricFamily("cpd_worker_ttft_seconds", "TTFT of prompts it computed.", labels=_LABELS)
        error = SummaryMetricFamily("cpd_worker_ttft_error_seconds", "Absolute error of its TTFTs.", labels=_LABELS)
        for names, worker in workers:
            live.add_metric(names, int(worker.live))
            if (view := worker.worker_load) is not None:
                ttft.add_metric(names, view.errors.count, view.errors.ttft_ms / 1e3)
                error.add_metric(names, view.errors.count, view.errors.error_ms / 1e3)
        yield from (live, ttft, error)
        for field, (kind, text) in _FIELDS.items():
            family = kind(f"cpd_worker_{field}", text, labels=_LABELS)
            for names, worker in workers:
                family.add_metric(names, getattr(worker.load, field))
            yield family
        for name, (kind, text, label, values) in _LABELLED.items():
            family = kind(f"cpd_worker_{name}", text, labels=[*_LABELS, label])
            for names, worker in workers:
                for value, count in sorted(values(worker.load).items()):
                    family.add_metric([*names, value], count)
            yield family
        shared = [(names, worker.load.residency) for names, worker in workers if worker.load.HasField("residency")]
        if shared:
            yield from _residency(shared)


def _residency(shared: Sequence[tuple[list[str], pb.Residency]]) -> Iterable[Metric]:
    """Returns the metrics of workers on shared devices."""
    states = GaugeMetricFamily("cpd_worker_residency", "1 for its model's state.", labels=[*_LABELS, "state"])
    for names, residency in shared:
        for name, state in _RESIDENCY_STATES.items():
            states.add_metric([*names, name], int(residency.state == state))
    yield states
    for metric, (text, value) in _RESIDENCY.items():
        counter = CounterMetricFamily(metric, text, labels=_LABELS)
        for names, residency in shared:
            counter.add_metric(names, value(residency))
        yield counter
