"""Prometheus' text format: the metrics of several routers as one.

Counters and histograms of the routers are added up. What a router says of a worker carries the router's name, so that
it stays apart: all routers report on the same workers.
"""

from collections.abc import Iterable


def merged(texts: Iterable[str]) -> str:
    """Adds up the samples that have the same name and labels.

    Args:
        texts: As `prometheus_client.generate_latest` writes them. When each counter was created is left out: of sums
            there is no such time.
    """
    families: dict[str, dict[str, float]] = {}
    for text in texts:
        samples: dict[str, float] = {}
        head: list[str] = []
        for line in text.splitlines():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                samples[series] = samples.get(series, 0.0) + float(value)
            elif line.startswith("# HELP"):
                head = [line]
            else:  # its type: the samples come next
                samples = families.setdefault("\n".join([*head, line]), {})
    return "".join(
        f"{head}\n" + "".join(f"{series} {value!r}\n" for series, value in samples.items())
        for head, samples in families.items()
        if not head.endswith("_created gauge")
    )
