"""Compares two source trees: `python -m scripts.bench_two_trees BEFORE AFTER`.

A tree is a checkout (`git worktree add ../before v0.2.0`). A cluster of each runs at the same time, simulated with
devices that take no time (`--simulate instant`), and the two take turns of half a second. So both meet the same drift
of the machine, and the median ratio of a pair of turns shows differences of 2 %, where runs one after the other differ
by 10 %. The loads are some of those of `scripts.bench_control_plane`, whose functions each side takes from its tree.

With `--tls` the second cluster is one between machines, with TLS for clients, sessions and prefill requests: `python -m
scripts.bench_two_trees . . --tls`. The client's own TLS is part of the difference, as it shares the cores; its time is
in the table.

With `--engine` the main path of `scripts.bench_main_path` is compared instead: one combined worker that computes. Both
clusters start several times, since a worker's start measures its rough profile, from which the batches follow.
"""

import argparse
import asyncio
import contextlib
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

LOADS = ("words 100 1000", "streams 100 1000", "words 2000 500", "one 10 400")
"""What is sent, words of a prompt, requests of a turn. With `one`, one request at a time asks for one token."""
ENGINE_LOADS = ("tokens 512 32",)
WARM_UP = 2


class Turn(NamedTuple):
    """A turn: requests a second, and microseconds of CPU for each request in the processes."""

    rate: float
    router_us: float
    workers_us: float
    client_us: float


class Side:
    """The cluster of one tree, in a process whose imports are the tree's."""

    def __init__(self, tree: str, kind: str) -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", kind],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": tree},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def turn(self, load: str) -> Turn:
        """Runs a load."""
        self._ask(load)
        return Turn(*map(float, self._answer().split()))

    def close(self) -> None:
        """Ends the cluster."""
        self._ask("")
        self._process.wait()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the cluster of {self.tree} failed")
        return line


def compare(trees: Sequence[str], kinds: Sequence[str], loads: Sequence[str], turns: int, starts: int) -> None:
    """Prints a table.

    Args:
        kinds: Kind of each tree's cluster: see `serve`.
    """
    first, second = ("without TLS", "with TLS") if "tls" in kinds else ("before", "after")
    print(f"| load | {first}: requests/s; µs of CPU: router, workers, client | {second} | ratio |")
    print("| --- | --- | --- | --- |")
    for _ in range(starts):
        sides = [Side(os.path.abspath(tree), kind) for tree, kind in zip(trees, kinds, strict=True)]
        try:
            for load in loads:
                took: list[list[Turn]] = [[], []]
                for number in range(turns + WARM_UP):
                    for index in (0, 1) if number % 2 else (1, 0):
                        turn = sides[index].turn(load)
                        if number >= WARM_UP:
                            took[index].append(turn)
                ratio = statistics.median(after.rate / before.rate for before, after in zip(*took, strict=True))
                cells = [_medians(side) for side in took]
                print(f"| {load.rsplit(' ', 1)[0]} | {cells[0]} | {cells[1]} | {ratio:.3f} |", flush=True)
        finally:
            for side in sides:
                side.close()


def _medians(turns: Sequence[Turn]) -> str:
    rate, *us = (statistics.median(column) for column in zip(*turns, strict=True))
    return f"{rate:,.4g}; {', '.join(f'{one:.0f}' for one in us)}"


def serve(kind: str) -> None:
    """Runs the loads that standard input names on a cluster of the tree in the working directory.

    Args:
        kind: `simulated`, `tls` (simulated, with TLS) or `engine`.
    """
    sys.path.insert(0, os.getcwd())
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if kind == "engine":
            _engine_loads(directory, stack)
        else:
            uvloop.run(_control_plane_loads(directory, stack, tls=kind == "tls"))


async def _control_plane_loads(directory: Path, stack: contextlib.ExitStack, *, tls: bool) -> None:
    from scripts import bench_control_plane as bench  # the tree's, not this one's

    settings: dict[str, Any] = {}
    if tls:
        from tests.certificates import certificate_files

        cert, key = certificate_files(directory)
        os.environ["SSL_CERT_FILE"] = str(cert)  # which the client trusts
        settings = {"host": "0.0.0.0", "tls_cert": cert, "tls_key": key}
    cluster = stack.enter_context(bench.simulated(**settings))
    prompts = bench.Prompts(int(time.time()))
    pids = {"router": cluster.pid("router-0"), "workers": cluster.pid("simulated"), "client": os.getpid()}
    with_tls = [ssl.create_default_context()] if tls else []
    print("ready", flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        words, requests = map(int, line[1:])
        if line[0] == "streams":
            texts = [prompts(words) for _ in range(requests)]
            cpu = bench.Cpu(pids)
            _, seconds = await bench.streams(cluster.url, texts, bench.AT_ONCE)
        else:
            port = cluster.settings.port
            at_once, output = (1, 1) if line[0] == "one" else (bench.AT_ONCE, bench.OUTPUT)
            bodies = [bench.plain_request(port, prompts(words), output) for _ in range(requests)]
            cpu = bench.Cpu(pids)
            _, seconds = await bench.plain(port, bodies, at_once, *with_tls)
        us = cpu.each(requests)
        print(requests / seconds, us["router"], us["workers"], us["client"], flush=True)


def _engine_loads(directory: Path, stack: contextlib.ExitStack) -> None:
    from rich.console import Console

    from bench.prepare import prepare  # the tree's
    from bench.report.progress import LiveProgress
    from bench.run import measure
    from models.tiny.make import write
    from scripts import bench_main_path as bench
    from scripts.bench_control_plane import Cpu
    from scripts.streams import MODEL_NAME
    from tests.e2e.cluster import Cluster

    write(directory / "model", **bench.MODEL)
    settings = {"model": str(directory / "model"), "dtype": "auto", "prefill": 0, "kv_memory": "256MiB"}
    cluster = stack.enter_context(Cluster(served_model_name=MODEL_NAME, **settings))
    pids = {"router": cluster.pid("router-0"), "workers": cluster.pid("combined-0"), "client": os.getpid()}
    progress = stack.enter_context(LiveProgress(Console(stderr=True, quiet=True)))
    print("ready", flush=True)
    while line := sys.stdin.readline().split():
        requests = int(line[2])
        load = bench.bench_settings(cluster.url, directory / "model", requests)
        prepared = prepare(load)
        cpu = Cpu(pids)
        result = measure(load, prepared, None, None, progress)
        us = cpu.each(requests)
        print(result.summary.requests_per_s, us["router"], us["workers"], us["client"], flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, metavar="TREE", help="source trees: before and after")
    parser.add_argument("--turns", type=int, default=12, help="turns of each tree with each load")
    parser.add_argument("--starts", type=int, default=1, help="starts of both clusters")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--tls", action="store_true", help="the second cluster has TLS")
    kinds.add_argument("--engine", action="store_true", help="compare the main path of one worker that computes")
    arguments = parser.parse_args()
    kind = "engine" if arguments.engine else "simulated"
    loads = ENGINE_LOADS if arguments.engine else LOADS
    compare(arguments.trees, (kind, "tls" if arguments.tls else kind), loads, arguments.turns, arguments.starts)


if __name__ == "__main__":
    main()
