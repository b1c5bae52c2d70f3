"""Compares the policy's choice of route with all prompts local and all remote: `python -m scripts.bench_routes`.

One prefill and one combined worker, real ones, on this machine's cores. Three routers serve them: one decides by
predicted cost, one prefills everything locally, one everything remotely. Each gets prompts in turn, in random order, so
that all three see the same machine. For each length of the prompt and number at a time it prints the mean TTFT and the
mean time of the whole answer, and their ratios to the better one of local and remote, with standard errors: a machine
with other work needs some twenty rounds.

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


def mean_ms(records: Sequence[Record], at: int) -> float:
    """Mean time to a token of the answers."""
    return 1e3 * statistics.fmean(record.content_s[at] - record.sent_s for record in records)


def to_better_one(rounds_ms: Mapping[str, Sequence[float]]) -> str:
    """The ratio of `auto` to the better one of `local` and `remote`, and its standard error (bootstrap of rounds)."""
    rounds = np.array([rounds_ms[route] for route in ROUTES])  # [3, rounds]
    samples = np.random.default_rng(0).integers(rounds.shape[1], size=(1000, rounds.shape[1]))
    auto, local, remote = rounds[:, samples].mean(axis=2)  # [1000] each
    mean = rounds.mean(axis=1)
    return f"{mean[0] / mean[1:].min():.2f} ± {np.std(auto / np.minimum(local, remote)):.2f}"


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
            records: list[Record] = []
            ttft_ms: dict[str, list[float]] = {route: [] for route in clients}
            e2e_ms: dict[str, list[float]] = {route: [] for route in clients}
            for number in range(rounds + 1):
                for route in rng.permutation(list(clients)).tolist():  # each leaves the machine in another state
                    prompts = [texts.text(rng, tokens) for _ in range(count)]
                    found = await round_of(clients[route], prompts, at_once)
                    if not number:  # warms up
                        continue
                    ttft_ms[route].append(mean_ms(found, 0))
                    e2e_ms[route].append(mean_ms(found, -1))
                    records += found if route == "auto" else []
            remote = statistics.fmean(one.route == "remote" for one in records)
            cells = []
            for figure in (ttft_ms, e2e_ms):
                cells += [
                    ", ".join(f"{statistics.fmean(figure[route]):.1f}" for route in ROUTES),
                    to_better_one(figure),
                ]
            print(f"| {tokens} | {at_once} | {' | '.join(cells)} | {remote:.0%} |", flush=True)
    for client in clients.values():
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds of each cell")
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
