"""The router's Prometheus metrics, which docs/metrics.md describes."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from cpd.rpc import cpd_pb2 as pb
from router.placement.worker_load import WorkerLoad

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_GAP_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

PAGE_STATES = ("free", "cached", "used", "reserved", "quarantined")


class WorkerReport(Protocol):
    """The parts of a worker session that metrics show."""

    @property
    def id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def live(self) -> bool: ...
    @property
    def load(self) -> pb.Load: ...
    @property
    def worker_load(self) -> WorkerLoad | None: ...


def pages(load: pb.Load) -> dict[str, int]:
    """The number of pages of a worker's pool, by owner state."""
    return {state: getattr(load, f"{state}_pages") for state in PAGE_STATES}


class Metrics:
    """All metrics of one router process, in a registry of its own.

    A metric with labels is a cached function of their values, since finding one in the library takes microseconds.

    Args:
        router_id: Label of what this router reports on workers.
        workers: Returns the workers to report on; called at every scrape.
    """

    def __init__(self, router_id: str, workers: Callable[[], Iterable[WorkerReport]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = cache(
            Counter(
                "cpd_requests", "Requests to the API, by how they ended.", ["outcome", "route"], registry=self.registry
            ).labels
        )
        self.errors = cache(
            Counter(
                "cpd_request_errors", "Requests that ended in an error, by its code.", ["code"], registry=self.registry
            ).labels
        )
        self.ttft = cache(
            Histogram(
                "cpd_ttft_seconds",
                "Request read to first token.",
                ["route"],
                buckets=_LATENCY_S,
                registry=self.registry,
            ).labels
        )
        self.itl = Histogram(
            "cpd_itl_seconds", "Gap between tokens of one output.", buckets=_GAP_S, registry=self.registry
        )
        self.e2e = cache(
            Histogram(
                "cpd_e2e_seconds", "Request read to last token.", ["route"], buckets=_LATENCY_S, registry=self.registry
            ).labels
        )
        self.queue = cache(
            Histogram(
                "cpd_queue_seconds",
                "Time that prompts waited in a worker's queue.",
                ["tenant"],
                buckets=_LATENCY_S,
                registry=self.registry,
            ).labels
        )
        self.tenant_tokens = cache(
            Counter(
                "cpd_tenant_prompt_tokens",
                "Tokens of prompts that have got their first token.",
                ["tenant"],
                registry=self.registry,
            ).labels
        )
        self.prompt_tokens = Counter("cpd_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.cached_tokens = Counter("cpd_cached_tokens", "Tokens of prompts from a cache.", registry=self.registry)
        self.output_tokens = Counter("cpd_output_tokens", "Tokens of outputs.", registry=self.registry)
        self.replays = Counter(
            "cpd_replays", "Requests placed again because their worker was lost.", registry=self.registry
        )
        self.refusals = cache(
            Counter(
                "cpd_refusals", "Requests that a worker gave back, by reason.", ["reason"], registry=self.registry
            ).labels
        )
        self.placements = cache(
            Counter(
                "cpd_placements",
                "Placements by route; replicated: another combined worker had more of the prompt cached.",
                ["route", "replicated"],
                registry=self.registry,
            ).labels
        )
        self.registry.register(_Workers(router_id, workers))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format. Any thread may call it."""
        return generate_latest(self.registry)


class _Workers:
    """Reads the workers' loads at every scrape, so that no value outlives its worker."""

    def __init__(self, router_id: str, workers: Callable[[], Iterable[WorkerReport]]) -> None:
        self._router_id = router_id
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        labels = ["router", "worker", "role"]
        live = GaugeMetricFamily("cpd_worker_live", "1 while the session with the worker is live.", labels=labels)
        running = GaugeMetricFamily("cpd_worker_running", "Sequences in the running batch.", labels=labels)
        waiting = GaugeMetricFamily("cpd_worker_waiting", "Requests in the waiting queue.", labels=labels)
        tokens = GaugeMetricFamily("cpd_worker_waiting_tokens", "Prompt tokens not yet computed.", labels=labels)
        queued = GaugeMetricFamily(
            "cpd_worker_queued_tokens", "Prompt tokens of requests not yet scheduled.", labels=labels
        )
        by_state = GaugeMetricFamily(
            "cpd_worker_pages", "Pages of the KV pool, by owner state.", labels=[*labels, "state"]
        )
        preemptions = CounterMetricFamily("cpd_worker_preemptions", "Sequences preempted.", labels=labels)
        computed = CounterMetricFamily("cpd_worker_tokens", "Tokens computed, by phase.", labels=[*labels, "phase"])
        fills = CounterMetricFamily("cpd_worker_fills", "Remote prefills, by outcome.", labels=[*labels, "outcome"])
        failures = CounterMetricFamily(
            "cpd_worker_fill_failures", "Failed remote prefills, by reason.", labels=[*labels, "reason"]
        )
        host_pages = GaugeMetricFamily("cpd_worker_host_pages", "Pages that host memory has room for.", labels=labels)
        host_offloaded = GaugeMetricFamily(
            "cpd_worker_host_offloaded_pages", "Evicted pages in host memory.", labels=labels
        )
        host_blocks = CounterMetricFamily(
            "cpd_worker_host_blocks", "Blocks of the host tier, by what happened to them.", labels=[*labels, "event"]
        )
        ttft = SummaryMetricFamily("cpd_worker_ttft_seconds", "TTFT of prompts it computed.", labels=labels)
        error = SummaryMetricFamily(
            "cpd_worker_ttft_error_seconds", "Absolute error of the predictions of these TTFTs.", labels=labels
        )
        for worker in self._workers():
            names, load = [self._router_id, worker.id, worker.role], worker.load
            if worker.worker_load is not None:
                errors = worker.worker_load.ttft_errors
                ttft.add_metric(names, errors.count, errors.ttft_ms / 1e3)
                error.add_metric(names, errors.count, errors.error_ms / 1e3)
            live.add_metric(names, int(worker.live))
            running.add_metric(names, load.running)
            waiting.add_metric(names, load.waiting)
            tokens.add_metric(names, load.waiting_tokens)
            queued.add_metric(names, load.queued_tokens)
            preemptions.add_metric(names, load.preemptions)
            for state, count in pages(load).items():
                by_state.add_metric([*names, state], count)
            phases = {"prefill": load.prefill_tokens, "decode": load.decode_tokens, "cached": load.cached_tokens}
            for phase, count in phases.items():
                computed.add_metric([*names, phase], count)
            for outcome, count in sorted(load.fills.items()):
                fills.add_metric([*names, outcome], count)
            for reason, count in sorted(load.fill_failures.items()):
                failures.add_metric([*names, reason], count)
            host_pages.add_metric(names, load.host_pages)
            host_offloaded.add_metric(names, load.host_offloaded_pages)
            for event, count in sorted(load.host_blocks.items()):
                host_blocks.add_metric([*names, event], count)
        by_worker = [live, running, waiting, tokens, queued, by_state, preemptions, computed, fills, failures]
        return [*by_worker, host_pages, host_offloaded, host_blocks, ttft, error]
