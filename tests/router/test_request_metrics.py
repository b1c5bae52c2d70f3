"""Metrics that cost less than the library's, which show the same."""

from random import Random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.request_metrics import PlainHistogram

BOUNDS = (0.001, 0.5, 1, 2.5, 100000.0)


def test_a_plain_histogram_shows_what_the_librarys_shows() -> None:
    ours, theirs, rng = CollectorRegistry(), CollectorRegistry(), Random(1)
    plain = PlainHistogram("gap_seconds", "Some gap.", ["route"], BOUNDS, ours)
    known = Histogram("gap_seconds", "Some gap.", ["route"], buckets=BOUNDS, registry=theirs)
    for _ in range(200):
        route, value = rng.choice(["local", 'a "b"\n']), rng.choice([*BOUNDS, 0.0, 1e9, rng.random()])
        plain.labels(route).observe(value)
        known.labels(route).observe(value)
    assert _lines(ours) == _lines(theirs)


def _lines(registry: CollectorRegistry) -> list[str]:
    return sorted(line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)
