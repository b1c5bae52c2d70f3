from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.exposition import merged


def _text(requests: int, seconds: float, worker: str) -> str:
    registry = CollectorRegistry()
    Counter("requests", "How many.", ["code"], registry=registry).labels('a "b" {c}').inc(requests)
    Histogram("wait_seconds", "How long.", buckets=(1, 5), registry=registry).observe(seconds)
    Counter("worker_steps", "Of a worker.", ["router"], registry=registry).labels(worker).inc(7)
    return generate_latest(registry).decode()


def test_counters_and_histograms_are_added_up_and_what_differs_in_labels_stays_apart() -> None:
    text = merged([_text(2, 0.5, "r0"), _text(3, 3.0, "r1")])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "requests": "counter",
        "wait_seconds": "histogram",
        "worker_steps": "counter",
    }
    assert [(one.labels, one.value) for one in families["requests"].samples] == [({"code": 'a "b" {c}'}, 5.0)]
    values = {(one.name, one.labels.get("le")): one.value for one in families["wait_seconds"].samples}
    assert values == {
        ("wait_seconds_bucket", "1.0"): 1.0,
        ("wait_seconds_bucket", "5.0"): 2.0,
        ("wait_seconds_bucket", "+Inf"): 2.0,
        ("wait_seconds_count", None): 2.0,
        ("wait_seconds_sum", None): 3.5,
    }
    assert [(one.labels, one.value) for one in families["worker_steps"].samples] == [
        ({"router": "r0"}, 7.0),
        ({"router": "r1"}, 7.0),
    ]


def test_one_router_alone_is_as_it_was_but_for_the_times_of_creation() -> None:
    text = _text(2, 0.5, "r0")
    assert merged([text]) == "".join(f"{line}\n" for line in text.splitlines() if "_created" not in line)
    assert merged([]) == ""
