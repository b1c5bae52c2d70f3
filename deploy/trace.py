"""`cpd trace`: what the last engine steps of the running cluster's workers consisted of.

Two forms: one JSON object a step and line, or one file for Perfetto (ui.perfetto.dev) and chrome://tracing, in which
each worker is a process, each of its lanes a thread, and what runs side by side is seen side by side.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc
import orjson

from cpd.common.errors import CPDError
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from deploy.endpoint import read_cluster
from deploy.remote import running_cluster
from worker.auth import token_metadata
from worker.calls import CLIENT_OPTIONS

_TIMEOUT_S = 10.0
_LANES = {pb.LANE_FULL: "full", pb.LANE_PREFILL: "prefill", pb.LANE_DECODE: "decode"}
_COUNTS = ("decodes", "decode_context", "prefills", "prefill_tokens", "prefill_context", "waiting", "waiting_tokens")

Step = Mapping[str, Any]
"""One line of the JSON form."""


def trace(cluster: str, worker: str, seconds: float, chrome: bool) -> None:
    """Prints the steps.

    Args:
        worker: Name of the only one to ask; empty: all.
        seconds: Steps that began that long ago at most; 0: all that the workers keep.
        chrome: The form for Perfetto instead of JSON lines.

    Raises:
        CPDError: There is no such cluster or worker, or it does not answer.
    """
    state = running_cluster(cluster)
    workers = read_cluster(state.url, state.cluster_token)["workers"]
    chosen = [known for known in workers if worker in ("", known["id"])]
    if worker and not chosen:
        names = ", ".join(known["id"] for known in workers) or "none"
        raise CPDError(f"no worker {worker!r} runs in cluster '{cluster}'; there are: {names}")
    steps = [step for known in chosen for step in _read(known["id"], known["address"], state.cluster_token, seconds)]
    steps.sort(key=lambda step: step["start_s"])
    if chrome:
        sys.stdout.write(orjson.dumps(chrome_trace(steps)).decode() + "\n")
    else:
        sys.stdout.writelines(orjson.dumps(step).decode() + "\n" for step in steps)


def chrome_trace(steps: Iterable[Step]) -> dict[str, Any]:
    """The Trace Event form; times count from the first step."""
    steps = list(steps)
    start_s = min((step["start_s"] for step in steps), default=0.0)
    workers = {name: number for number, name in enumerate(sorted({step["worker"] for step in steps}), 1)}
    events: list[dict[str, Any]] = []
    for name, number in workers.items():
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        for lane, label in enumerate(_LANES.values(), 1):
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": lane, "args": {"name": label}})
    lanes = {label: lane for lane, label in enumerate(_LANES.values(), 1)}
    for step in steps:
        place = {"pid": workers[step["worker"]], "tid": lanes[step["lane"]]}
        begin_us = 1e6 * (step["start_s"] - start_s)
        details = {name: step[name] for name in ("share", *_COUNTS)}
        events.append(
            {"ph": "X", "name": _name(step), "ts": begin_us, "dur": 1e3 * step["ms"], "args": details, **place}
        )
        end_us = begin_us + 1e3 * step["ms"]
        waiting = {"sequences": step["waiting"]}
        events.append({"ph": "C", "name": "waiting", "ts": end_us, "pid": place["pid"], "args": waiting})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(step: Step) -> str:
    parts = []
    if step["decodes"]:
        parts.append(f"decode {step['decodes']}")
    if step["prefill_tokens"]:
        parts.append(f"prefill {step['prefill_tokens']}")
    return " + ".join(parts)


def _read(worker: str, address: str, token: str, seconds: float) -> Iterator[Step]:
    with grpc.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        try:
            reply: pb.TraceReply = rpc.AdminStub(channel).Trace(
                pb.TraceRequest(seconds=seconds), metadata=token_metadata(token), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise CPDError(f"worker {worker} at {address} does not answer: {error.details()}") from None
    for step in reply.steps:
        yield {
            "worker": worker,
            "lane": _LANES[step.lane],
            "start_s": round(step.start_s, 6),
            "ms": round(step.ms, 3),
            "share": round(step.share, 4),
            **{name: getattr(step, name) for name in _COUNTS},
        }
