"""`cpd trace`: prints the last engine steps of a running cluster's workers.

There are two formats: JSON lines with one step each, or the Trace Event format of Perfetto (ui.perfetto.dev) and
chrome://tracing, with a process per worker and a thread per lane.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import orjson

from cpd.common.errors import CPDError
from cpd.common.tls import without_fingerprint
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from deploy.cluster_status import read_cluster
from deploy.remote import running_cluster
from worker.grpc_options import admin_channel, admin_metadata

_TIMEOUT_S = 10.0
_LANES = {pb.LANE_FULL: "full", pb.LANE_PREFILL: "prefill", pb.LANE_DECODE: "decode"}
_COUNTS = ("decodes", "decode_context", "prefills", "prefill_tokens", "prefill_context", "waiting", "waiting_tokens")

Step = Mapping[str, Any]
"""One JSON line."""


def trace(cluster: str, worker: str, seconds: float, chrome: bool) -> None:
    """Prints the steps.

    Args:
        worker: Name of one worker; empty: all.
        seconds: Only steps that began within the last seconds; 0: all that the workers keep.
        chrome: Print the Trace Event format.

    Raises:
        CPDError: There is no such cluster or worker, or it does not answer.
    """
    state = running_cluster(cluster)
    workers = read_cluster(state)["workers"]
    chosen = [known for known in workers if worker in ("", known["id"])]
    if worker and not chosen:
        names = ", ".join(known["id"] for known in workers) or "none"
        raise CPDError(f"no worker {worker!r} runs in cluster '{cluster}'; there are: {names}")
    steps = [step for known in chosen for step in _read(known["id"], known["address"], state.admin_key, seconds)]
    steps.sort(key=lambda step: step["start_s"])
    if chrome:
        sys.stdout.write(orjson.dumps(chrome_trace(steps)).decode() + "\n")
    else:
        sys.stdout.writelines(orjson.dumps(step).decode() + "\n" for step in steps)
    sys.stderr.write(summary(steps, chrome=chrome))


def summary(steps: Sequence[Step], *, chrome: bool) -> str:
    """Says what was written, and how to look at it."""
    workers = len({step["worker"] for step in steps})
    seconds = max(step["start_s"] for step in steps) - steps[0]["start_s"] if steps else 0.0
    steps_of = f"{len(steps):,} step{'s' * (len(steps) != 1)} of {workers} worker{'s' * (workers != 1)}"
    count = f"{steps_of} within {seconds:.1f} s"
    if chrome:
        return f"{count}. Open the file at https://ui.perfetto.dev (or chrome://tracing).\n"
    return f"{count}, one JSON document a line. With --chrome it is a file for https://ui.perfetto.dev.\n"


def chrome_trace(steps: Iterable[Step]) -> dict[str, Any]:
    """Returns the steps in the Trace Event format; time 0 is the first step's start."""
    steps = list(steps)
    start_s = min((step["start_s"] for step in steps), default=0.0)
    workers = {name: number for number, name in enumerate(sorted({step["worker"] for step in steps}), 1)}
    lanes = {lane: number for number, lane in enumerate(_LANES.values(), 1)}
    events: list[dict[str, Any]] = []
    for worker, pid in workers.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": worker}})
        for lane, tid in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
    for step in steps:
        pid, tid = workers[step["worker"]], lanes[step["lane"]]
        begin_us, duration_us = 1e6 * (step["start_s"] - start_s), 1e3 * step["ms"]
        end_us = begin_us + duration_us
        details = {name: step[name] for name in ("share", *_COUNTS)}
        name = " + ".join(
            f"{label} {step[count]}"
            for label, count in (("decode", "decodes"), ("prefill", "prefill_tokens"))
            if step[count]
        )
        run = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin_us, "dur": duration_us, "args": details}
        waiting = {"ph": "C", "name": "waiting", "pid": pid, "ts": end_us, "args": {"sequences": step["waiting"]}}
        events += [run, waiting]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _read(worker: str, address: str, admin_key: str, seconds: float) -> Iterator[Step]:
    try:
        with admin_channel(address, _TIMEOUT_S) as channel:
            reply: pb.TraceReply = rpc.AdminStub(channel).Trace(
                pb.TraceRequest(seconds=seconds), metadata=admin_metadata(admin_key), timeout=_TIMEOUT_S
            )
    except (grpc.RpcError, OSError) as error:
        reason = error.details() if isinstance(error, grpc.RpcError) else error
        place = without_fingerprint(address)
        raise CPDError(f"worker {worker} at {place} does not answer: {reason}") from None
    for step in reply.steps:
        yield {
            "worker": worker,
            "lane": _LANES[step.lane],
            "start_s": round(step.start_s, 6),
            "ms": round(step.ms, 3),
            "share": round(step.share, 4),
            **{name: getattr(step, name) for name in _COUNTS},
        }
