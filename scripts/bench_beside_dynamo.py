"""Measures the control plane beside NVIDIA Dynamo's: `python -m scripts.bench_beside_dynamo --dynamo VENV`.

Run it from the repository's root. It sends the loads of `scripts.bench_control_plane`, with the same client, in turn to
Dynamo's frontend with its KV router and four of its mock engines, and to our router with four simulated combined (and
two prefill) workers. Both sides have the same cores and answer with equally many tokens; one idles while the other is
measured. Dynamo's mock engines run a million times faster than the engines they simulate; ours take no time. The last
load compares routes: Dynamo's remote route is a second deployment with two prefill and four decode engines.

Dynamo runs with its defaults (blocks of 64 tokens, token cache, cache events, threads), TCP and ZMQ between its
processes, file-based discovery, and the lowest log level (a line per request).

VENV is a virtual environment with Dynamo. It needs neither etcd nor NATS, nor Dynamo's package for modelling hardware,
which isn't on PyPI:

    python3 -m venv VENV && VENV/bin/pip install --no-deps ai-dynamo==1.6.1
    VENV/bin/pip install ai-dynamo-runtime==1.6.1 'aiohttp>=3.14.3' certifi 'kubernetes<33' msgspec
    VENV/bin/pip install prometheus-client pyzmq 'redis<9' tqdm 'transformers>=4.56' zstandard
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import uvloop

from deploy.endpoint import pick_port
from models import tiny
from scripts.bench_control_plane import (
    AT_ONCE,
    OUTPUT,
    REMOTE_WORDS,
    Cpu,
    Prompts,
    add_routes,
    latency,
    simulated,
    streams,
    throughput,
)
from scripts.beside import Figures, in_turn, running
from scripts.streams import MODEL_NAME, alternate, ttft_ms
from tests.e2e.cluster import HOST

ENGINES, PREFILL_ENGINES = 4, 2
SPEEDUP = "1000000"
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
HOSTS = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")


@dataclass(frozen=True)
class Side:
    """One of the two systems: the port of its endpoint, and its processes by name."""

    port: int
    pids: Mapping[str, int]

    @property
    def url(self) -> str:
        """Base URL of its endpoint."""
        return f"http://{HOST}:{self.port}"


Load = Callable[[Side], Coroutine[None, None, Figures]]


@contextmanager
def dynamo(venv: Path, tokenizer: str, engines: Mapping[str, tuple[int, Sequence[str]]]) -> Iterator[Side]:
    """Runs Dynamo's frontend and mock engines.

    Args:
        venv: Virtual environment with Dynamo.
        tokenizer: Kind of tokenizer.
        engines: (number of engines, their flags) by role (`agg`, `prefill`, `decode`).
    """
    module = (venv / "bin/python", "-m")
    port = pick_port(HOST, 0)
    address = ("--http-host", HOST, "--http-port", str(port))
    model = ("--model-path", tiny.CHECKPOINT, "--model-name", MODEL_NAME)
    commands: list[tuple[str | Path, ...]] = [
        (*module, "dynamo.frontend", *address, "--router-mode", "kv", "--tokenizer", tokenizer, *PLANES)
    ]
    for mode, (number, flags) in engines.items():
        shape = ("--disaggregation-mode", mode, "--num-workers", str(number), *flags)
        commands.append((*module, "dynamo.mocker", *model, *shape, "--speedup-ratio", SPEEDUP, *PLANES))

    def is_ready() -> bool:
        with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False) as client:
            instances = client.get("/health").json()["instances"]
            found = sum(instance["endpoint"] == "generate" for instance in instances)
            asked = {"model": MODEL_NAME, "prompt": "the", "max_tokens": 1}
            return found == sum(number for number, _ in engines.values()) and (
                client.post("/v1/completions", json=asked).is_success
            )

    with tempfile.TemporaryDirectory() as directory:
        environment = {"DYN_FILE_KV": directory, "DYN_LOG": "error", **dict.fromkeys(HOSTS, HOST)}
        with running("Dynamo", commands, environment, is_ready) as (frontend, *workers):
            names = (f"workers-{mode}" for mode in engines)
            yield Side(port, {"router": frontend, **dict(zip(names, workers, strict=True))})


def costs(each: Mapping[str, float]) -> Figures:
    """CPU time of a request in us by kind of process."""
    kinds = ("router", "workers", "client")
    sums = (sum(cost for name, cost in each.items() if name.startswith(kind)) for kind in kinds)
    return {f"CPU us: {kind}": cost for kind, cost in zip(kinds, sums, strict=True)}


async def one_at_a_time(prompts: Prompts, requests: int, max_tokens: int, side: Side) -> Figures:
    """Measures whole answers, one at a time."""
    return {"p50": await latency(side.port, prompts, requests, max_tokens)}


async def many_at_a_time(prompts: Prompts, requests: int, words: int, side: Side) -> Figures:
    """Measures whole answers, AT_ONCE at a time."""
    each: list[Mapping[str, float]] = []
    rate = await throughput(side.port, prompts, requests, words, {**side.pids, "client": os.getpid()}, each)
    return {"requests/s": rate, **costs(each[0])}


async def streaming(prompts: Prompts, requests: int, at_once: int, side: Side) -> Figures:
    """Measures streams, `at_once` at a time."""
    texts = [prompts(100) for _ in range(requests)]
    cpu = Cpu({**side.pids, "client": os.getpid()})
    records, seconds = await streams(side.url, texts, at_once)
    each = cpu.each(requests)
    chunks = sum(len(record.content_s) for record in records)
    return {
        "TTFT p50": ttft_ms(records),
        "chunks/s": chunks / seconds,
        "chunks a request": chunks / requests,
        **costs(each),
    }


async def by_route(prompts: Prompts, each: int, urls: Mapping[str, str]) -> Figures:
    """Measures the time that the remote route adds."""
    records = await alternate(urls, partial(prompts, REMOTE_WORDS), each, OUTPUT)
    ms = {route: ttft_ms(records[route]) for route in urls}
    return {"TTFT p50, local": ms["local"], "TTFT p50, remote": ms["remote"], "added": ms["remote"] - ms["local"]}


def compare(title: str, rounds: int, sides: Mapping[str, Callable[[], Coroutine[None, None, Figures]]]) -> None:
    """Measures one load on both sides in turn, after a warm-up."""
    for load in sides.values():
        uvloop.run(load())

    def once(load: Callable[[], Coroutine[None, None, Figures]], turn: int) -> Figures:
        return uvloop.run(load())

    in_turn(title, rounds, {name: partial(once, load) for name, load in sides.items()})


def main() -> None:
    """Measures all loads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamo", type=Path, required=True, metavar="VENV", help="where Dynamo is installed")
    parser.add_argument("--tokenizer", default="default", help="Dynamo's: default, fastokens or basetenkenizer")
    parser.add_argument("--bootstrap", action="store_true", help="let Dynamo's engines connect during prefills")
    parser.add_argument("--routers", type=int, default=1, help="number of our routers")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each load")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of requests in a round")
    arguments = parser.parse_args()
    prompts = Prompts(int(time.time()))

    def count(requests: int) -> int:
        return max(AT_ONCE, int(requests * arguments.scale))

    loads: dict[str, Load] = {}
    for tokens in (1, OUTPUT):
        loads[f"1 at a time, 10 words in, {tokens} out"] = partial(one_at_a_time, prompts, count(300), tokens)
    for words in (100, 2000):
        title = f"{AT_ONCE} at a time, {words} words in, {OUTPUT} out"
        loads[title] = partial(many_at_a_time, prompts, count(1500), words)
    for at_once, requests in ((1, 150), (AT_ONCE, 1000)):
        title = f"streams, {at_once} at a time, 100 words in, {OUTPUT} out"
        loads[title] = partial(streaming, prompts, count(requests), at_once)

    start = partial(dynamo, arguments.dynamo, arguments.tokenizer)
    with start({"agg": (ENGINES, ())}) as theirs, simulated(routers=arguments.routers) as cluster:
        names = [f"router-{number}" for number in range(arguments.routers)]
        pids = {"workers": cluster.pid("simulated"), **{name: cluster.pid(name) for name in names}}
        ours = Side(cluster.settings.port, pids)
        for title, load in loads.items():
            compare(title, arguments.rounds, {"Dynamo": partial(load, theirs), "cpd": partial(load, ours)})
        ports = ",".join(str(pick_port(HOST, 0)) for _ in range(PREFILL_ENGINES))
        flags = ("--bootstrap-ports", ports) if arguments.bootstrap else ()
        wire = ("--kv-transfer-bandwidth", "0")  # takes no time, that is
        with start({"prefill": (PREFILL_ENGINES, (*wire, *flags)), "decode": (ENGINES, wire)}) as remote:
            urls = {"Dynamo": {"local": theirs.url, "remote": remote.url}, "cpd": add_routes(cluster)}
            sides = {name: partial(by_route, prompts, count(100), each) for name, each in urls.items()}
            compare(f"{REMOTE_WORDS} words in, one stream at a time", arguments.rounds, sides)


if __name__ == "__main__":
    main()
