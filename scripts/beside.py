"""Helpers of comparisons with other servers: runs their processes, and measures two sides in turn."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from bench.report.text import number

START_S = 300.0
COUNTS = ("completed", "prompt tokens", "cached")

Figures = Mapping[str, float]
"""Figures by name; times in milliseconds."""

console = Console()


@contextmanager
def running(
    name: str, commands: Sequence[Sequence[str | Path]], environment: Mapping[str, str], is_ready: Callable[[], bool]
) -> Iterator[list[int]]:
    """Runs the processes of a server while the context is open. Yields their ids when the server is ready.

    Args:
        name: Name of the server, for messages.
        commands: The command of each process.
        environment: Environment variables to add.
        is_ready: Asks the server whether it is ready; may raise httpx's errors.

    Raises:
        SystemExit: The server did not start; the message has the end of its log.
    """
    with tempfile.TemporaryFile("w+") as log:
        processes = [
            subprocess.Popen(
                [*map(str, command)],
                stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        try:
            if not _become_ready(is_ready, processes):
                log.seek(0)
                raise SystemExit("".join([*log.readlines()[-30:], f"{name} did not start within {START_S:.0f} s"]))
            yield [process.pid for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
            for process in processes:
                process.wait(60)


def _become_ready(is_ready: Callable[[], bool], processes: Sequence["subprocess.Popen[bytes]"]) -> bool:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        try:
            if is_ready():
                return True
        except httpx.HTTPError:
            pass
        time.sleep(1)
    return False


def in_turn(title: str, rounds: int, sides: Mapping[str, Callable[[int], Figures]]) -> None:
    """Measures both sides in turn. Prints all figures, and the median of the rounds' ratios."""
    first, second = sides
    measured: dict[str, list[Figures]] = {first: [], second: []}
    for turn in range(rounds):
        # alternate the order, because the second finds a warmer machine
        for name in (first, second) if turn % 2 == 0 else (second, first):
            measured[name].append(sides[name](turn))
            console.print(f"[dim]{turn + 1}/{rounds} {name}: {text(measured[name][-1])}")
    table = Table("", first, second, "ratios", "median", title=title)
    for metric in (name for name in measured[first][0] if name in measured[second][0] and name not in COUNTS):
        before, after = ([figures[metric] for figures in measured[name]] for name in (first, second))
        ratios = [ours / theirs for theirs, ours in zip(before, after, strict=True)]
        cells = (", ".join(number(value) for value in values) for values in (before, after))
        table.add_row(metric, *cells, ", ".join(f"{ratio:.2f}" for ratio in ratios), f"{median(ratios):.3f}")
    console.print(table, highlight=False)


def text(figures: Figures) -> str:
    """Formats figures in a line."""
    return ", ".join(f"{name} {number(value)}" for name, value in figures.items())
