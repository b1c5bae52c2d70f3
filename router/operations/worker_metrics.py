"""Prometheus metrics of the workers, from their load reports; docs/metrics.md describes them.

Workers fill their reports in `worker/load_report.py` and in the `add_load` of their services and of `SourcePool`
(`worker/page_sender.py`), which counts the KV pages it sends.
`router/request_metrics.py` has the metrics of requests.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from cpd.common.buckets import TRANSFER_BYTES, TRANSFER_BYTES_PER_S, TRANSFER_S
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.worker_session import WorkerSession
from router.dispatch.workers import BEST_FIRST, Workers

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

_OF_RESIDENCY: dict[str, tuple[str, Callable[[pb.Residency], float]]] = {
    "cpd_worker_wakes": ("Wakes of its model after the first load.", attrgetter("wakes")),
    "cpd_worker_wake_wait_seconds": ("Time in which requests waited for these wakes.", attrgetter("waited_s")),
    "cpd_gpu_cas_conflicts": ("Writes of the device's record that came too late.", attrgetter("cas_conflicts")),
}
"""Counters of workers on shared devices."""

_TRANSFERS: dict[str, tuple[str, Sequence[float]]] = {
    "bytes": ("Size of transfers of KV pages that it sent.", TRANSFER_BYTES),
    "seconds": ("Duration of these transfers.", TRANSFER_S),
    "bytes_per_second": ("Speed of these transfers.", TRANSFER_BYTES_PER_S),
}
"""Histograms that are fields of `Transfers`, with the bounds of their buckets."""


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
        # While it is not connected there is no report. Zeros would make counters jump when it is connected again.
        workers = [(names, worker) for names, worker in workers if worker.load != pb.Load()]
        for field, (kind, text) in _FIELDS.items():
            family = kind(f"cpd_worker_{field}", text, labels=_LABELS)
            for names, worker in workers:
                family.add_metric(names, getattr(worker.load, field))
            yield family
        if shared := [(names, worker) for names, worker in workers if worker.shared]:
            yield from self._residencies(shared)
        for name, (kind, text, label, values) in _LABELLED.items():
            family = kind(f"cpd_worker_{name}", text, labels=[*_LABELS, label])
            for names, worker in workers:
                for value, count in sorted(values(worker.load).items()):
                    family.add_metric([*names, value], count)
            yield family
        for field, (text, bounds) in _TRANSFERS.items():
            sent = HistogramMetricFamily(f"cpd_worker_transfer_{field}", text, labels=_LABELS)
            for names, worker in workers:
                histogram: pb.Histogram = getattr(worker.load.transfers, field)
                if len(histogram.counts) == len(bounds) + 1:  # else it has sent none, or is of another version
                    counts = accumulate(histogram.counts)
                    buckets = [(str(bound), count) for bound, count in zip((*bounds, "+Inf"), counts, strict=True)]
                    sent.add_metric(names, buckets, histogram.sum)
            yield sent

    def _residencies(self, shared: Sequence[tuple[list[str], WorkerSession]]) -> Iterable[Metric]:
        """Metrics of the model and of its workers, whose devices are shared."""
        of_model = GaugeMetricFamily("cpd_model_state", "1 for the state of the model.", labels=["router", "state"])
        of_worker = GaugeMetricFamily(
            "cpd_worker_residency", "1 for the state of the worker's model.", labels=[*_LABELS, "state"]
        )
        best = self._workers.residency
        for state in BEST_FIRST:
            of_model.add_metric([self._workers.router_id, state], int(state == best))
            for names, worker in shared:
                of_worker.add_metric([*names, state], int(state == worker.residency))
        yield from (of_model, of_worker)
        parts = CounterMetricFamily(
            "cpd_worker_residency_seconds", "Time of going to sleep and waking.", labels=[*_LABELS, "part"]
        )
        for names, worker in shared:
            for part, seconds in sorted(worker.load.residency.took_s.items()):
                parts.add_metric([*names, part], seconds)
        yield parts
        for metric, (text, value) in _OF_RESIDENCY.items():
            counter = CounterMetricFamily(metric, text, labels=_LABELS)
            for names, worker in shared:
                counter.add_metric(names, value(worker.load.residency))
            yield counter
