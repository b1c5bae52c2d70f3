"""Computes the figures of a run from the times of its requests. docs/metrics.md defines the figures.

All figures follow from the rows of requests in the result file, so that anyone can check them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bench.record import Failure, Record
from bench.result import Group, Request, Stat, Steady, Summary
from bench.slo import Slo
from bench.statistics import Floats, stat

_STEADY_SHARE = 0.9  # of the usual number of requests in flight


def summarise(
    records: Sequence[Record], *, start_s: float, slo: Slo | None, offered_per_s: float | None
) -> tuple[Summary, list[Request]]:
    """Computes the figures of a run, and a row for each request in the order in which they were due.

    Args:
        records: Ended requests in any order.
        start_s: Start of the run, on the clock of the records.
        slo: Latency targets for goodput; None leaves goodput out.
        offered_per_s: Scheduled sessions per second of an open loop; None in a closed one.
    """
    rows = [request_row(record, start_s, slo) for record in sorted(records, key=lambda record: record.due_s)]
    counted = [row for row in rows if row.error != Failure.ABORTED]
    completed = [row for row in counted if not row.error]
    duration_s = max((row.ended_s for row in counted), default=0.0)
    errors = Counter(row.error for row in counted if row.error)
    prompt_tokens = _total(row.prompt_tokens for row in completed)
    output_tokens = _total(row.output_tokens for row in completed)
    all_tokens = None if prompt_tokens is None or output_tokens is None else prompt_tokens + output_tokens
    good = sum(row.good is True for row in counted) if slo else None
    summary = Summary(
        duration_s=duration_s,
        completed=len(completed),
        failed=len(counted) - len(completed),
        aborted=len(rows) - len(counted),
        errors=dict(errors.most_common()),
        ttft_ms=_stat(completed, lambda row: row.ttft_ms),
        first_gap_ms=_stat(completed, lambda row: row.first_gap_ms),
        itl_ms=_itl(completed),
        tpot_ms=_stat(completed, lambda row: row.tpot_ms),
        e2e_ms=_stat(completed, lambda row: row.e2e_ms),
        service_ttft_ms=_stat(completed, lambda row: row.service_ttft_ms),
        service_e2e_ms=_stat(completed, lambda row: row.service_e2e_ms),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(all_tokens, duration_s),
        requests_per_s=_rate(len(completed), duration_s) or 0.0,
        offered_per_s=offered_per_s,
        achieved_per_s=_achieved(rows, duration_s, open_loop=offered_per_s is not None),
        goodput_per_s=_rate(good, duration_s),
        goodput_share=good / len(counted) if good is not None and counted else None,
        cached_token_rate=_cached_token_rate(completed),
        schedule_lag_ms=_schedule_lag_ms(counted),
        by_turn=_by_turn(counted),
        by_route=_by_route(counted),
        steady=_steady(counted, completed),
    )
    return summary, rows


def request_row(record: Record, start_s: float, slo: Slo | None) -> Request:
    """The row of a request in the result file."""
    chunks = np.array(record.content_s)
    first_s = record.content_s[0] if record.content_s else None
    gaps = np.round(np.diff(chunks) * 1e3, 3).tolist()
    tpot_ms = None
    if gaps and record.output_tokens is not None and record.output_tokens >= 2:
        tpot_ms = round((chunks[-1] - chunks[0]) * 1e3 / (record.output_tokens - 1), 3)
    ended_s = None if record.error else record.ended_s
    row = Request(
        session=record.session,
        turn=record.turn,
        input_len=record.input_len,
        output_len=record.output_len,
        due_s=round(record.due_s - start_s, 6),
        sent_s=round(record.sent_s - start_s, 6),
        ended_s=round(record.ended_s - start_s, 6),
        ttft_ms=_milliseconds(record.due_s, first_s),
        answer_ms=_milliseconds(record.due_s, record.answer_s),
        first_gap_ms=gaps[0] if gaps else None,
        itl_ms=gaps,
        tpot_ms=tpot_ms,
        e2e_ms=_milliseconds(record.due_s, ended_s),
        service_ttft_ms=_milliseconds(record.sent_s, first_s),
        service_e2e_ms=_milliseconds(record.sent_s, ended_s),
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        cached_tokens=record.cached_tokens,
        status=record.status,
        error=record.error,
        detail=record.detail,
        finish_reason=record.finish_reason,
        route=record.route,
        worker=record.worker,
        good=None,
    )
    if slo and record.error != Failure.ABORTED:
        row.good = slo.good(row)
    return row


def _milliseconds(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1e3, 3)


def _stat(rows: Sequence[Request], latency: Callable[[Request], float | None]) -> Stat:
    pairs = [(value, row.session) for row in rows if (value := latency(row)) is not None]
    return stat([value for value, _ in pairs], [session for _, session in pairs])


def _itl(rows: Sequence[Request]) -> Stat:
    gaps = [gap for row in rows for gap in row.itl_ms]
    return stat(gaps, np.repeat([row.session for row in rows], [len(row.itl_ms) for row in rows]))


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum, or None if a count is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _rate(count: float | None, duration_s: float) -> float | None:
    return count / duration_s if count is not None and duration_s > 0 else None


def _achieved(rows: Sequence[Request], duration_s: float, *, open_loop: bool) -> float:
    """Sessions begun per second: in an open loop while sessions were sent, in a closed loop over the whole run."""
    begun = sorted(row.sent_s for row in rows if row.turn == 0)
    if open_loop and len(begun) > 1 and begun[-1] > begun[0]:
        return (len(begun) - 1) / (begun[-1] - begun[0])
    return _rate(len(begun), duration_s) or 0.0


def _cached_token_rate(completed: Sequence[Request]) -> float | None:
    """Share of cached prompt tokens; None if the server never reports it. Some servers report only non-zero values."""
    if all(row.cached_tokens is None for row in completed):
        return None
    prompt_tokens = _total(row.prompt_tokens for row in completed)
    return sum(row.cached_tokens or 0 for row in completed) / prompt_tokens if prompt_tokens else None


def _schedule_lag_ms(counted: Sequence[Request]) -> float | None:
    if not counted:
        return None
    return float(np.percentile([row.sent_s - row.due_s for row in counted], 99)) * 1e3


def _by_turn(counted: Sequence[Request]) -> list[Group]:
    """A group for each turn; empty if every session has one turn."""
    turns = sorted({row.turn for row in counted})
    if turns in ([], [0]):
        return []
    return [_group(f"turn {turn + 1}", [row for row in counted if row.turn == turn]) for turn in turns]


def _by_route(counted: Sequence[Request]) -> list[Group]:
    """A group for each route; empty if the server names none. Requests that failed before routing are in no group."""
    routes = sorted({row.route for row in counted if row.route})
    return [_group(route, [row for row in counted if row.route == route]) for route in routes]


def _group(name: str, rows: Sequence[Request]) -> Group:
    completed = [row for row in rows if not row.error]
    return Group(
        name=name,
        completed=len(completed),
        failed=len(rows) - len(completed),
        ttft_ms=_stat(completed, lambda row: row.ttft_ms),
        itl_ms=_itl(completed),
        tpot_ms=_stat(completed, lambda row: row.tpot_ms),
        e2e_ms=_stat(completed, lambda row: row.e2e_ms),
        cached_token_rate=_cached_token_rate(completed),
    )


def _steady(counted: Sequence[Request], completed: Sequence[Request]) -> Steady | None:
    """Figures of the steady window. Each chunk, first token and end of a request counts by its own time."""
    window = _window(counted)
    if window is None:
        return None
    start_s, end_s = window
    duration_s = end_s - start_s
    ended = sum(start_s <= row.ended_s <= end_s for row in completed)
    first_tokens: list[Request] = []
    gaps: list[Floats] = []
    sessions: list[int] = []
    tokens: float | None = 0.0
    for row in completed:
        chunks_s = _chunks_s(row)
        inside = (start_s <= chunks_s) & (chunks_s <= end_s)
        if inside[0]:
            first_tokens.append(row)
        gaps.append(np.array(row.itl_ms)[inside[1:]])
        sessions.append(row.session)
        # The tokens of each chunk are unknown: assume that they are spread evenly.
        if row.output_tokens is None or tokens is None:
            tokens = None
        else:
            tokens += row.output_tokens * float(inside.mean())
    return Steady(
        start_s=start_s,
        end_s=end_s,
        completed=ended,
        output_tokens_per_s=_rate(tokens, duration_s),
        requests_per_s=ended / duration_s,
        ttft_ms=_stat(first_tokens, lambda row: row.ttft_ms),
        itl_ms=stat(np.concatenate(gaps or [np.empty(0)]), np.repeat(sessions, [len(part) for part in gaps])),
    )


def _window(counted: Sequence[Request]) -> tuple[float, float] | None:
    """The steady window: from the first time that the number of requests in flight reaches 90 % of its median over
    time, until it last falls below that."""
    if not counted:
        return None
    times = np.array([row.sent_s for row in counted] + [row.ended_s for row in counted])
    steps = np.repeat([1, -1], len(counted))
    order = np.lexsort((-steps, times))
    times, in_flight = times[order], np.cumsum(steps[order])
    lasted = np.diff(times, append=times[-1])
    by_number = np.argsort(in_flight)
    shares = np.cumsum(lasted[by_number])
    usual = in_flight[by_number][np.searchsorted(shares, shares[-1] / 2)]
    (steady,) = np.nonzero(in_flight >= max(1, _STEADY_SHARE * usual))
    start_s, end_s = float(times[steady[0]]), float(times[steady[-1] + 1])
    return (start_s, end_s) if end_s > start_s else None


def _chunks_s(row: Request) -> Floats:
    """Times of the chunks of a completed request, in seconds from the start of the run."""
    assert row.ttft_ms is not None
    return row.due_s + np.cumsum([row.ttft_ms, *row.itl_ms]) / 1e3
