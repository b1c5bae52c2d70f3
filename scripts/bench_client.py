"""Checks the load generator against a mock server with a TTFT of 50 ms and an ITL of 5 ms.

Usage: `python -m scripts.bench_client [--streams 1,64,512,1000]`, from the repository's root. Runs `cpd bench run` once
for each number of streams, and compares its report with the mock server's own timestamps, because on few cores the mock
server may be late too. A run whose client was too slow reports no figures, which is right.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer
from bench.report.text import milliseconds, percent
from bench.result import Result

TTFT_MS, ITL_MS = 50.0, 5.0
OUTPUT_LEN = 200
ROUNDS = 3  # requests per stream


@dataclass(frozen=True)
class Truth:
    """The mock server's own medians in ms: from reading a request to its first chunk, and between chunks."""

    ttft_ms: float
    itl_ms: float


def run(streams: int) -> tuple[Result, Truth]:
    """Runs `cpd bench run` with some streams at a time."""
    with (
        tempfile.TemporaryDirectory() as directory,
        MockServer(Behaviour(ttft_ms=TTFT_MS, itl_ms=ITL_MS, keep_sends=True)) as mock,
    ):
        path = Path(directory) / "result.json"
        command = [str(Path(sys.executable).with_name("cpd")), "bench", "run"]
        flags = {
            "--url": mock.url,
            "--concurrency": streams,
            "--num-requests": max(20, ROUNDS * streams),
            "--input-len": 64,
            "--output-len": OUTPUT_LEN,
            "--json": path,
        }
        # The exit code of a limited client is not 0, and its result is still written.
        subprocess.run([*command, *(str(part) for flag in flags.items() for part in flag)], capture_output=True)
        if not path.exists():
            raise SystemExit(f"the run with {streams} streams wrote no result; try {' '.join(command)} yourself")
        sends = httpx.get(f"{mock.url}/sends", timeout=60, trust_env=False).json()
        measured = [times for times in sends.values() if len(times) > OUTPUT_LEN]  # leaves trial requests out
        return Result.load(path), Truth(
            1e3 * median(first - read for read, first, *_ in measured),
            1e3 * median(after - before for _, *sent in measured for before, after in pairwise(sent)),
        )


def main() -> None:
    """Prints a row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,512,1000", help="numbers of streams, comma-separated")
    reasons: list[str] = []
    table = Table(title=f"TTFT {TTFT_MS:g} ms, ITL {ITL_MS:g} ms: medians")
    for name in ("streams", "TTFT", "error", "mock's own", "ITL", "error", "mock's own", "chunks/s", "CPU", ""):
        table.add_column(name, justify="right" if name else "left")
    for streams in (int(part) for part in parser.parse_args().streams.split(",")):
        result, truth = run(streams)
        summary, client = result.summary, result.client
        ttft_ms, itl_ms = summary.ttft_ms.p50, summary.itl_ms.p50
        table.add_row(
            f"{streams:,}",
            *(milliseconds(ttft_ms), percent(ttft_ms and ttft_ms / TTFT_MS - 1), milliseconds(truth.ttft_ms)),
            *(milliseconds(itl_ms), percent(itl_ms and itl_ms / ITL_MS - 1), milliseconds(truth.itl_ms)),
            f"{(summary.itl_ms.count + summary.ttft_ms.count) / summary.duration_s:,.0f}",
            percent(client.cpu_share),
            "limited" if client.limited else "reported",
        )
        reasons += [f"{streams:,} streams: {reason}" for reason in client.reasons]
    Console().print(table, *reasons, sep="\n", highlight=False)


if __name__ == "__main__":
    main()
