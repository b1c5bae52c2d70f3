"""Compares the policy's choice of route with all prompts local and all remote: `python -m scripts.bench_routes`.

One prefill and one combined worker, real ones, on this machine's cores. Three routers serve them: one decides by
predicted cost, one prefills everything locally, one everything remotely. Each gets prompts in turn, in random order, so
that all three see the same machine. For each length of the prompt and number at a time it prints the mean TTFT and the
mean time of the whole answer, and their ratios to the better one of local and remote.

With `--busy` another process uses a core meanwhile.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import uvloop

from bench.client.client import Client
from bench.record import Record
from bench.tokens import Texts
from cpd.common.policy_settings import PolicySettings
from models import tiny
from scripts.streams import MODEL_NAME, machine, stream, target
from tests.e2e.cluster import Cluster

LENGTHS = (128, 512, 2048)
AT_ONCE = (1, 8, 16)
OUTPUT = 32
ROUTES: Mapping[str, int | str] = {"auto": "auto", "local": 1 << 20, "remote": 0}
"""`--long-prefill-tokens` of each router."""


@contextmanager
def other_work(busy: bool) -> Iterator[None]:
    """Runs a process that needs a core."""
    if not busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def round_of(client: Client, prompts: Sequence[str], at_once: int) -> list[Record]:
    """Sends prompts, `at_once` at a time."""
    waiting = iter(prompts)

    async def user() -> list[Record]:
        return [await stream(client, prompt, OUTPUT) for prompt in waiting]

    return [record for records in await asyncio.gather(*(user() for _ in range(at_once))) for record in records]


def mean_s(records: Sequence[Record], at: int) -> float:
    """Mean time to a token of the answers."""
    return statistics.fmean(record.content_s[at] - record.sent_s for record in records)


async def measure(urls: Mapping[str, str], rounds: int, scale: float) -> None:
    """Measures and prints all cells."""
    clients = {route: Client(target(url)) for route, url in urls.items()}
    texts, rng = Texts.with_tokenizer(tiny.CHECKPOINT), np.random.default_rng(int(time.time()))
    print(
        "| tokens | at a time | TTFT, ms: auto, local, remote | ratio | E2E, ms: auto, local, remote | ratio | remote |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tokens in LENGTHS:
        for at_once in AT_ONCE:
            count = max(2 * at_once, round(scale * 48 * 512 / max(tokens, 512)))
            records: dict[str, list[Record]] = {route: [] for route in clients}
            for number in range(rounds + 1):
                for route in rng.permutation(list(clients)).tolist():  # each leaves the machine in another state
                    prompts = [texts.text(rng, tokens) for _ in range(count)]
                    found = await round_of(clients[route], prompts, at_once)
                    records[route] += found if number else []  # the first round warms up
            ttft, e2e = (
                {
                    route: statistics.fmean(one.content_s[at] - one.sent_s for one in found)
                    for route, found in records.items()
                }
                for at in (0, -1)
            )
            remote = statistics.fmean(one.route == "remote" for one in records["auto"])
            cells = []
            for figure in (ttft, e2e):
                best = min(figure["local"], figure["remote"])
                cells += [", ".join(f"{1e3 * figure[route]:.1f}" for route in ROUTES), f"{figure['auto'] / best:.2f}"]
            print(f"| {tokens} | {at_once} | {' | '.join(cells)} | {remote:.0%} |", flush=True)
    for client in clients.values():
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each cell")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of requests in a round")
    parser.add_argument("--busy", action="store_true", help="with another process that needs a core")
    parser.add_argument("--policy", default="{}", help="settings of the policy, as JSON")
    options = parser.parse_args()
    policy = PolicySettings.model_validate_json(options.policy)
    print(machine())
    with Cluster(model=str(tiny.CHECKPOINT), served_model_name=MODEL_NAME, prefill=1, combined=1) as cluster:
        urls = {route: cluster.add_router(long_prefill_tokens=limit, policy=policy) for route, limit in ROUTES.items()}
        with other_work(options.busy):
            uvloop.run(measure(urls, options.rounds, options.scale))


if __name__ == "__main__":
    main()
