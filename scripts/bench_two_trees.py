"""Compares the control plane of two source trees: `python -m scripts.bench_two_trees BEFORE AFTER`.

A tree is a checkout (`git worktree add ../before v0.2.0`). A cluster of each runs at the same time, simulated with
devices that take no time (`--simulate instant`), and the two take turns of half a second. So both meet the same drift
of the machine, and the median ratio of a pair of turns shows differences of 2 %, where runs one after the other differ
by 10 %. The loads are some of those of `scripts.bench_control_plane`, whose functions each side takes from its tree.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import uvloop

LOADS = ("words 100 1000", "streams 100 1000", "words 2000 500")
"""What is sent, words of a prompt, requests of a turn."""
WARM_UP = 2


class Turn(NamedTuple):
    """A turn: requests a second, and microseconds of CPU for each request in the router and in the workers."""

    rate: float
    router_us: float
    workers_us: float


class Side:
    """The cluster of one tree, in a process whose imports are the tree's."""

    def __init__(self, tree: str) -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve"],
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


def compare(trees: Sequence[str], turns: int) -> None:
    """Prints a table."""
    sides = [Side(os.path.abspath(tree)) for tree in trees]
    print("| load | before: requests/s; µs of CPU: router, workers | after | ratio |\n| --- | --- | --- | --- |")
    try:
        for load in LOADS:
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
    rate, router_us, workers_us = (statistics.median(column) for column in zip(*turns, strict=True))
    return f"{rate:,.0f}; {router_us:.0f}, {workers_us:.0f}"


def serve() -> None:
    """Runs the loads that standard input names on a cluster of the tree in the working directory."""
    sys.path.insert(0, os.getcwd())
    from scripts import bench_control_plane as bench  # that tree's, not this one's

    async def loads(cluster: Any) -> None:
        prompts = bench.Prompts(int(time.time()))
        pids = {"router": cluster.pid("router-0"), "workers": cluster.pid("simulated")}
        print("ready", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            words, requests = map(int, line[1:])
            if line[0] == "streams":
                texts = [prompts(words) for _ in range(requests)]
                cpu = bench.Cpu(pids)
                _, seconds = await bench.streams(cluster.url, texts, bench.AT_ONCE)
            else:
                port = cluster.settings.port
                bodies = [bench.plain_request(port, prompts(words), bench.OUTPUT) for _ in range(requests)]
                cpu = bench.Cpu(pids)
                _, seconds = await bench.plain(port, bodies, bench.AT_ONCE)
            us = cpu.each(requests)
            print(requests / seconds, us["router"], us["workers"], flush=True)

    with bench.simulated() as cluster:
        uvloop.run(loads(cluster))


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, metavar="TREE", help="source trees: before and after")
    parser.add_argument("--turns", type=int, default=12, help="turns of each tree with each load")
    arguments = parser.parse_args()
    compare(arguments.trees, arguments.turns)


if __name__ == "__main__":
    main()
