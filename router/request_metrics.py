"""Prometheus metrics of requests, which docs/metrics.md describes.

`router/operations/worker_metrics.py` has those of workers, `vllm_metrics.py` beside it the same under other names.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.activity import Activity
from router.usage import Usage

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 2.5, 5, 10, 25, 60)
_GAP_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_WAKE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 45, 60, 90, 120, 300)
_TOKENS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))

_ALARMING = ("internal_error", "request_crashes_workers", "service_unavailable", "wait_too_long", "wake_failed")
"""Codes of errors for which deploy/prometheus/rules.yml has alerts. They are counted from 0, because Prometheus does
not see the first errors of a series that begins with them."""


class RouterMetrics:
    """The metrics of one router process, with the usual ones of a process (`process_…`).

    `activity` is what the log's summary shows of the last seconds.

    Attributes:
        usage: What each tenant has used.
        errors: Counts error responses, by code.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.usage = Usage()
        self._registry = CollectorRegistry()
        self._registry.register(self.usage)
        ProcessCollector(registry=self._registry)
        self._models = _Models()
        self._registry.register(self._models)
        counter = Counter("cpd_request_errors", "Error responses by error code.", ["code"], registry=self._registry)
        self.errors = cache(counter.labels)
        for code in _ALARMING:
            self.errors(code)

    def registry(self, model: str = "") -> CollectorRegistry:
        """Returns where the metrics of a model are registered, which get a label with its name; with an empty name
        where those without this label are."""
        return self._models.registries.setdefault(model, CollectorRegistry()) if model else self._registry

    def text(self) -> bytes:
        """The metrics in Prometheus' text format. Any thread may call it."""
        return generate_latest(self._registry)


class _Models(Collector):
    """Adds the label `model` to the metrics of each model's registry."""

    def __init__(self) -> None:
        self.registries: dict[str, CollectorRegistry] = {}

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self.registries.items():
            for metric in registry.collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [one._replace(labels={"model": model, **one.labels}) for one in metric.samples]
        return families.values()


class PlainCounter(Collector):
    """A counter without labels that one thread counts with, as cheap as an addition: it counts every token.

    Attributes:
        count: The count so far.
    """

    def __init__(self, name: str, help_text: str, registry: CollectorRegistry) -> None:
        self.count = 0
        self._name, self._help = name, help_text
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._help, value=self.count)]


class PlainHistogram(Collector):
    """A histogram that one thread adds to, four times as fast as with the library's: it has the gap of every token.

    Args:
        labels: Names of its labels.
        bounds: Upper bounds of its buckets, but for the last one.
    """

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help_text, labels, bounds
        self._series: dict[tuple[str, ...], Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> "Buckets":
        """The buckets for these values of the labels."""
        return self._series.setdefault(values, Buckets(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Any thread may call it."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, series in self._series.copy().items():
            family.add_metric(values, [*zip(names, accumulate(series.counts), strict=True)], series.sum)
        return [family]


class Buckets:
    """Counts values by size.

    Attributes:
        counts: The number of values in each bucket; the last one is for those above all bounds.
        sum: Sum of the values.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class RequestMetrics:
    """The metrics of the requests to a model.

    A metric with labels is a cached function of their values, since finding one in the library takes microseconds.

    Args:
        router: The metrics of the router.
        model: Value of the label `model`; empty if the router has one model.

    Attributes:
        activity, usage: Those of the router.
        metrics: All metrics, by their names without `cpd_` and `_total`.
    """

    def __init__(self, router: RouterMetrics, model: str = "") -> None:
        self.activity, self.usage = router.activity, router.usage
        registry = router.registry(model)
        self.metrics: dict[str, Collector] = {}

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            made = self.metrics[name] = Counter(f"cpd_{name}", help_text, labels, registry=registry)
            return made

        def plain_counter(name: str, help_text: str) -> PlainCounter:
            made = self.metrics[name] = PlainCounter(f"cpd_{name}", help_text, registry)
            return made

        def histogram(name: str, help_text: str, *labels: str, buckets: Sequence[float] = _LATENCY_S) -> PlainHistogram:
            made = self.metrics[name] = PlainHistogram(f"cpd_{name}", help_text, labels, buckets, registry)
            return made

        def plain_histogram(name: str, help_text: str, buckets: Sequence[float] = _LATENCY_S) -> Buckets:
            return histogram(name, help_text, buckets=buckets).labels()

        self.requests = cache(counter("requests", "API calls by outcome.", "outcome", "route").labels)
        self.ttft = cache(histogram("ttft_seconds", "Time from request to first token.", "route").labels)
        self.itl = plain_histogram("itl_seconds", "Gap between two outputs of one choice.", _GAP_S)
        self.e2e = cache(histogram("e2e_seconds", "Time from request to the end of its response.", "route").labels)
        self.prefill = plain_histogram("prefill_seconds", "Time to first token without that in the queue.")
        self.decode = plain_histogram("decode_seconds", "Time from first token to the end of the response.")
        self.transfer_wait = plain_histogram(
            "transfer_wait_seconds", "Time from first token until its KV pages were there."
        )
        self.queue = cache(histogram("queue_seconds", "Time of prompts in a worker's queue.", "tenant").labels)
        waits = "Time that prompts waited for their model to wake, if they did."
        self.wake_waits = cache(histogram("wake_wait_seconds", waits, "tenant", buckets=_WAKE_S).labels)
        self.prompt_tokens = plain_counter("prompt_tokens", "Prompt tokens.")
        self.cached_tokens = plain_counter("cached_tokens", "Prompt tokens taken from a cache.")
        self.output_tokens = plain_counter("output_tokens", "Output tokens.")
        self.prompt_length = plain_histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.output_length = plain_histogram("request_output_tokens", "Tokens of a choice.", _TOKENS)
        self.choices = cache(counter("choices", "Choices by the reason of their end.", "finish_reason").labels)
        self.replays = counter("replays", "Requests placed again because their worker was lost.")
        self.convictions = counter("convictions", "Requests given up because two workers crashed while running them.")
        moves = "Outputs that left a worker that drains, is slow or full; returned: no other one took it."
        self.moves = cache(counter("moves", moves, "outcome").labels)
        self.refusals = cache(counter("refusals", "Requests that a worker gave back, by reason.", "reason").labels)
        replicated = "Placements; replicated: another combined worker had more of the prompt cached."
        self.fallback = Gauge(
            "cpd_policy_fallback", "1 while predictions are mostly wrong and not used.", registry=registry
        )
        self.placements = cache(counter("placements", replicated, "route", "replicated").labels)
