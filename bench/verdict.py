"""Decides whether the client was fast enough for the figures to be the server's."""

from collections.abc import Mapping

from bench.load.plan import Health
from bench.result import Accuracy, Summary

_TOLERANCE = 0.05  # relative error of a median that the client may cause
_ITL_TOLERANCE = 0.2  # larger, because equal delays at both ends of a gap cancel out
_TAIL_SHARE = 0.5
_FULL_IDLE = 0.15  # with less idle time of the machine, processes take time from each other
_CLIENT_SHARE = 0.1  # of the machine's time
_BUSY_SHARE = 0.9  # of a core; above it, events queue up in the client
_LAG_MS = 10.0  # a smaller schedule lag is always accepted
_RATE_SHARE = 0.95


def why_limited(summary: Summary, health: Health, accuracy: Accuracy | None) -> list[str]:
    """The reasons why the client limited the figures; empty if the figures are the server's."""
    medians_ms = {"TTFT": summary.service_ttft_ms.p50, "ITL": summary.itl_ms.p50}
    reasons = slow_client(health, accuracy, medians_ms)
    lag_ms = summary.schedule_lag_ms
    if lag_ms is not None and lag_ms > max(_LAG_MS, _TOLERANCE * (summary.ttft_ms.p50 or 0.0)):
        reasons.append(f"requests left {lag_ms:.0f} ms (p99) after they were due")
    if summary.offered_per_s and summary.achieved_per_s < _RATE_SHARE * summary.offered_per_s:
        reasons.append(f"it sent {summary.achieved_per_s:.2f} requests/s where {summary.offered_per_s:.2f} were due")
    return reasons


def slow_client(health: Health, accuracy: Accuracy | None, medians_ms: Mapping[str, float | None]) -> list[str]:
    """The reasons that don't depend on the load. `medians_ms` has the measured medians by name."""
    reasons = inaccurate(accuracy) if accuracy else []
    if health.cpu_share > _BUSY_SHARE:
        reasons.append(f"a client process was busy for {health.cpu_share:.0%} of the time")
    if health.machine_idle < _FULL_IDLE and health.machine_share > _CLIENT_SHARE:
        reasons.append(
            f"this machine's cores were idle for {health.machine_idle:.0%} of the time, and the client took "
            f"{health.machine_share:.0%} of it: "
            "it may have slowed down a server here, and others may have slowed it down"
        )
    for name, median_ms in medians_ms.items():
        tolerance = _ITL_TOLERANCE if name == "ITL" else _TOLERANCE
        if median_ms and health.loop_lag_ms_p50 > tolerance * median_ms:
            reasons.append(
                f"what arrived waited {health.loop_lag_ms_p50:.2f} ms (median) for the client to look at it: "
                f"more than {tolerance:.0%} of the median {name}"
            )
    return reasons


def doubts(summary: Summary, health: Health) -> list[str]:
    """Warnings about delays that the client may have added to valid figures."""
    p99_ms = summary.itl_ms.p99
    if p99_ms is None or health.loop_lag_ms_p99 <= _TAIL_SHARE * p99_ms:
        return []
    return [
        f"one of a hundred arrivals waited {health.loop_lag_ms_p99:.1f} ms or longer for the client to look at it: "
        "the highest percentiles may be the client's"
    ]


def inaccurate(accuracy: Accuracy) -> list[str]:
    """The reason that the self-test alone can show, if it does."""
    if max(accuracy.ttft_error, accuracy.itl_error) <= _TOLERANCE:
        return []
    return [
        f"against a server of known timing, {accuracy.streams} streams at {accuracy.chunks_per_s:.0f} chunks/s, "
        f"its median TTFT was {accuracy.ttft_error:.0%} off and its median ITL {accuracy.itl_error:.0%}"
    ]
