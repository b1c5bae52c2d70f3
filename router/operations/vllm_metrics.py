"""Metrics under vLLM's names, which dashboards, gateways and load generators read; docs/metrics.md lists them.

They show what this router and the workers' last load reports count anyway: each is made when it is read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cpd.common.blocks import BLOCK_SIZE
from router.dispatch.worker_session import WorkerSession
from router.dispatch.workers import Workers
from router.operations.worker_metrics import pages
from router.request_metrics import RequestMetrics

_SAME = {
    "time_to_first_token_seconds": "ttft_seconds",
    "inter_token_latency_seconds": "itl_seconds",
    "time_per_output_token_seconds": "itl_seconds",  # its name before vLLM 0.11
    "e2e_request_latency_seconds": "e2e_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_output_tokens",
    "request_success": "choices",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "output_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
}
"""Our names of metrics, by vLLM's; as in `RequestMetrics.metrics`."""

_LABELS = {"le": "le", "finish_reason": "finished_reason"}
"""vLLM's names of labels, by ours. Values that differ in other labels are added up."""


@dataclass(frozen=True, slots=True)
class ServedMetrics:
    """What there is to show of a model."""

    name: str
    requests: RequestMetrics
    workers: Workers


class VllmMetrics(Collector):
    """Shows the metrics of all models, with the label `model_name`."""

    def __init__(self, models: Sequence[ServedMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        for name, ours in _SAME.items():
            found = [(one.name, metric) for one in self._models for metric in one.requests.metrics[ours].collect()]
            family = Metric(f"vllm:{name}", found[0][1].documentation, found[0][1].type)
            for model, metric in found:
                _add(family, metric, model)
            yield family
        yield from self._load()

    def _load(self) -> Iterable[Metric]:
        """Figures of the workers that answer requests. A prompt that a prefill worker computes waits at one of them."""
        label = ["model_name"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences in running batches.", labels=label)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests in waiting queues.", labels=label)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Part of the KV pages in use, up to 1.", labels=label)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "KV pages.", labels=[*label, "block_size", "num_gpu_blocks"]
        )
        for model in self._models:
            loads = [session.load for session in _answering(model.workers)]
            counts = [pages(load) for load in loads]
            total = sum(sum(count.values()) for count in counts)
            unused = sum(count["free"] + count["cached"] for count in counts)
            running.add_metric([model.name], sum(load.running for load in loads))
            waiting.add_metric([model.name], sum(load.waiting for load in loads))
            usage.add_metric([model.name], 1 - unused / total if total else 0)
            cache.add_metric([model.name, str(BLOCK_SIZE), str(total)], 1)
        yield from (running, waiting, usage, cache)


def _answering(workers: Workers) -> list[WorkerSession]:
    """The combined workers; without any, those that answer in their place."""
    live = [session for session in workers.sessions if session.live]
    return [session for session in live if session.role == "combined"] or live


def _add(family: Metric, ours: Metric, model: str) -> None:
    """Adds the samples of our metric to vLLM's."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in ours.samples:
        if not sample.name.endswith("_created"):
            labels = tuple((_LABELS[label], value) for label, value in sample.labels.items() if label in _LABELS)
            key = sample.name.removeprefix(ours.name), labels
            sums[key] = sums.get(key, 0.0) + sample.value
    for (suffix, labels), value in sums.items():
        family.add_sample(f"{family.name}{suffix}", {"model_name": model, **dict(labels)}, value)
