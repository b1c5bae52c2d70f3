"""`cpd bench selftest`: measures the load generator's own error against a server with known timing.

The real load path (client processes, arrivals, workload, HTTP client) sends to a mock server that records when it read
each request and sent each chunk. `time.perf_counter()` is the same clock in all processes of a machine, so lateness of
the mock server does not count as an error of the client.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike
from rich import box
from rich.console import Console
from rich.table import Table

from bench.client.client import Client
from bench.client.target import Target
from bench.errors import BenchError
from bench.load.plan import Plan
from bench.load.run import run_load
from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer
from bench.record import Record
from bench.report.text import count, milliseconds, number, percent
from bench.result import Accuracy
from bench.settings import RunSettings
from bench.tokens import Texts
from bench.workloads.make import make_workload

_TTFT_S = 0.05
_ITL_S = 0.005
_MOST_CHUNKS_PER_S = 40_000  # the mock server must keep up on the cores that the client leaves
_MOST_REQUESTS_PER_S = 600  # with more, sending limits the client instead of its streams
_REQUEST_S = 0.25
_TEST_S = 1.5


@dataclass(frozen=True, slots=True)
class _Shape:
    """A load with `streams` concurrent streams that begin evenly spread."""

    rate: float
    requests: int
    itl_s: float
    chunks: int

    @classmethod
    def of(cls, streams: int) -> "_Shape":
        itl_s = max(_ITL_S, streams / _MOST_CHUNKS_PER_S)
        request_s = max(_REQUEST_S, streams / _MOST_REQUESTS_PER_S, _TTFT_S + 2 * itl_s)
        rounds = max(1, round(_TEST_S / request_s) - 1)  # the last requests take one more round
        return cls(streams / request_s, streams * rounds, itl_s, round((request_s - _TTFT_S) / itl_s))


class _Silent:
    """Shows no progress."""

    def update(self, finished: Sequence[Record], in_flight: int, elapsed_s: float) -> None:
        """See `bench.load.run.Watch`."""


def selftest(streams: int, processes: int) -> Accuracy:
    """Measures a mock server for two seconds (longer beyond 600 streams), and compares the times.

    Raises:
        BenchError: The mock server did not start, or a request to it failed.
        KeyboardInterrupt: Ctrl-C.
    """
    shape = _Shape.of(streams)
    with MockServer(Behaviour(ttft_ms=_TTFT_S * 1e3, itl_ms=shape.itl_s * 1e3, keep_sends=True)) as mock:
        # Ignore the environment, which describes the server to measure.
        settings = RunSettings.model_construct(
            url=mock.url,
            rate=shape.rate,
            arrival="constant",
            num_requests=shape.requests,
            input_len="16",
            output_len=str(shape.chunks),
        )
        plan = Plan(Target.of(settings, "mock"), settings, Texts.measured(1.0, 0), seed=0, processes=processes)
        report = run_load(plan, _Silent())
        if report.interrupted:
            raise KeyboardInterrupt
        _check(report.records)
        sends = asyncio.run(_sends(plan.target))
    workload = make_workload(settings, plan.texts, plan.seed)
    prompts = {record.session: workload.session(record.session).turns[0].text for record in report.records}
    return compare(streams, report.records, {session: sends[prompt] for session, prompt in prompts.items()})


def compare(streams: int, records: Sequence[Record], sends: Mapping[int, Sequence[float]]) -> Accuracy:
    """The client's error.

    Args:
        streams: Concurrent streams.
        records: Completed requests, as the client saw them.
        sends: By session, the times at which the server read the request and sent each chunk with text, in seconds.
    """
    sent = [np.asarray(sends[record.session]) for record in records]
    came = [np.asarray(record.content_s) for record in records]
    if any(len(stamps) != len(times) - 1 for stamps, times in zip(came, sent, strict=True)):
        raise BenchError("self-test: the client did not count each chunk of the mock server once")
    delays_ms = 1e3 * np.concatenate([stamps - times[1:] for stamps, times in zip(came, sent, strict=True)])
    all_sent = np.concatenate([times[1:] for times in sent])
    return Accuracy(
        streams=streams,
        chunks_per_s=len(all_sent) / float(np.ptp(all_sent)),
        ttft_error=_error(
            [stamps[0] - record.due_s for stamps, record in zip(came, records, strict=True)],
            [times[1] - times[0] for times in sent],
        ),
        itl_error=_error(
            np.concatenate([np.diff(stamps) for stamps in came]),
            np.concatenate([np.diff(times[1:]) for times in sent]),
        ),
        delay_ms_p50=float(np.percentile(delays_ms, 50)),
        delay_ms_p99=float(np.percentile(delays_ms, 99)),
    )


def report(accuracy: Accuracy, console: Console) -> None:
    """Prints the result of the self-test."""
    table = Table(title=f"The client at {count(accuracy.streams, 'stream')}", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("chunks read a second", number(accuracy.chunks_per_s))
    table.add_row("error of the median TTFT", percent(accuracy.ttft_error))
    table.add_row("error of the median ITL", percent(accuracy.itl_error))
    table.add_row("from a chunk's sending to its time stamp, median", milliseconds(accuracy.delay_ms_p50))
    table.add_row("the same, 99th percentile", milliseconds(accuracy.delay_ms_p99))
    console.print(table)


def _check(records: Sequence[Record]) -> None:
    failed = [record for record in records if record.error]
    if failed:
        raise BenchError(
            f"self-test: {len(failed)} of {len(records)} requests to a mock server on this machine failed, "
            f"the first with {failed[0].error}: {failed[0].detail or 'no detail'}"
        )


def _error(measured: ArrayLike, true: ArrayLike) -> float:
    """Relative error of the median."""
    return abs(float(np.median(np.asarray(measured)) / np.median(np.asarray(true))) - 1)


async def _sends(target: Target) -> dict[str, list[float]]:
    client = Client(target)
    try:
        _, sends = await client.get_json("/sends")
    finally:
        await client.close()
    return cast(dict[str, list[float]], sends)
