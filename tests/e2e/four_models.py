"""`python -m tests.e2e.four_models`: four models share a machine's memory for two, and every token is checked.

A real `cpd up` in float32 serves four checkpoints, one of which is popular. Clients of all four ask at the same time,
with OpenAI's client, which never tries again. Each answer is compared with what transformers computed before. Streams
are long and `drain_timeout` is short, so many of them are parked in the middle.

Meanwhile the device's record in Redis is watched. Prints a table; ends with code 1 if a request failed, a token was
wrong, no stream was parked, or the rule was broken: a model waited longer than it was promised, was displaced before
its `min_runtime`, or although it is popular.
"""

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import typer
from redis.asyncio import Redis
from transformers.utils import logging

from cpd.common.trust import read_secret
from cpd.residency.ledger import Ledger, Look
from cpd.residency.record import Entry, Waiting
from cpd.residency.snapshot import ModelState
from deploy.state import ClusterDir
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.e2e.oracle import MARGIN

PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
FAMILIES = {"llama": "llama3", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Family of each model, by its name."""
POPULAR = "qwen3"
FAIRNESS = {"min_runtime": "5s", "max_wait_time": "2s"}
SLEEP = {"drain_timeout": "200ms"}
"""Shorter than most answers, so that streams are parked."""
KV_BYTES = 64 << 20
DEVICE_BYTES = 160 << 20
"""For two models: their pools, and weights of a few MiB."""
STAGING_BYTES = 16 << 20
PROMPTS = 4
SHORT, LONG = 20, 300
"""Tokens of a prompt; every second one is long."""
OUTPUT_TOKENS = 400
PAUSE_S = 3.0
"""Mean pause of a client between two requests."""
LOOK_S = 0.02
ROUNDING_S = 1e-3
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Results:
    """What happened to one model.

    Attributes:
        first_s: Longest time from a request to the first token of its stream.
        wait_s, promised_s: The longest wait for a wake, and what was promised for that one.
        late: Wakes that came later than promised.
        displaced: How often it went to sleep for others.
        early: How often it did before its `min_runtime`.
        parked: Streams that went on after a wake.
    """

    answers: int = 0
    wrong: int = 0
    first_s: float = 0.0
    wakes: int = 0
    wait_s: float = 0.0
    promised_s: float = 0.0
    late: int = 0
    displaced: int = 0
    early: int = 0
    parked: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """A prompt, and what transformers answers, as far as it is sure."""

    prompt: list[int]
    token_ids: list[int]


class Watch:
    """Watches the record of the device.

    Args:
        results: By model; what is seen is added.
    """

    def __init__(self, ledger: Ledger, results: Mapping[str, Results]) -> None:
        self._ledger = ledger
        self._results = results
        self._entries: dict[str, Entry] = {}
        self._intents: dict[str, Waiting] = {}
        self._resumed: dict[str, int] = {}

    async def run(self, over: asyncio.Event) -> None:
        """Looks until it is over. (Until Python 3.12, a call of Redis with a timeout may ignore a cancellation.)"""
        while not over.is_set():
            self._see(await self._ledger.look())
            await asyncio.sleep(LOOK_S)

    def _see(self, look: Look) -> None:
        record = look.record
        assert record is not None, "the record of the device is lost"
        for entry in record.entries:
            results = self._results[entry.model]
            before = self._entries.get(entry.id)
            if before is not None and before.state is ModelState.SERVING and entry.since_s != before.since_s:
                results.displaced += 1
                results.early += entry.since_s - before.since_s < entry.min_runtime_s - ROUNDING_S
            intent = self._intents.get(entry.id)
            if intent is not None and entry.state is ModelState.SERVING:
                self._served(results, intent, entry)
            resumed = look.activities[entry.owner.key].activity.resumed if entry.owner.key in look.activities else 0
            results.parked += max(0, resumed - self._resumed.get(entry.id, 0))
            self._resumed[entry.id] = resumed
        self._entries = {one.id: one for one in record.entries}
        self._intents = {one.worker: one for one in record.intents}

    @staticmethod
    def _served(results: Results, intent: Waiting, entry: Entry) -> None:
        wait_s, promised_s = entry.since_s - intent.since_s, intent.latest_s - intent.since_s
        results.wakes += 1
        results.late += wait_s > promised_s + ROUNDING_S
        if wait_s > results.wait_s:
            results.wait_s, results.promised_s = wait_s, promised_s


def make_models(directory: Path) -> dict[str, list[Expected]]:
    """Writes the checkpoints; returns what each model is asked and answers."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    expected: dict[str, list[Expected]] = {}
    for seed, (name, family) in enumerate(FAMILIES.items()):
        checkpoint = make_checkpoint(directory / name, family, seed=seed)
        rng = random.Random(seed)
        found = expected[name] = list[Expected]()
        while len(found) < PROMPTS:
            prompt = [rng.randrange(3, 400) for _ in range(LONG if len(found) % 2 else SHORT)]
            answer = oracle_generate(checkpoint, prompt, OUTPUT_TOKENS)
            # float32 does not promise the same token where transformers decides by less
            sure = next((place for place, margin in enumerate(answer.margins) if margin < MARGIN), OUTPUT_TOKENS)
            if sure:
                found.append(Expected(prompt, answer.token_ids[:sure]))
    return expected


def write_settings(directory: Path, residency: str) -> Path:
    """Writes the YAML file of the cluster. YAML is a superset of JSON."""
    models = [
        {"name": name, "model": str(directory / name), "fairness": {**FAIRNESS, "popular": name == POPULAR}}
        for name in FAMILIES
    ]
    settings = {
        "models": models,
        "sleep": SLEEP,
        "device_memory": DEVICE_BYTES,
        "staging_memory": STAGING_BYTES,
        "residency": residency,
        "dtype": "float32",
        "device": "cpu",
        "kv_memory": KV_BYTES,
        "port": 0,
        "log_level": "warning",
    }
    path = directory / "cluster.yaml"
    path.write_text(json.dumps(settings))
    return path


async def ask(client: openai.AsyncOpenAI, name: str, expected: Expected, stream: bool, results: Results) -> None:
    """Makes a request, and compares its answer."""
    tokens = min(random.choice((1, 20, OUTPUT_TOKENS)), len(expected.token_ids))
    given: Any = {
        "model": name,
        "prompt": expected.prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    begun_s = time.monotonic()
    token_ids: list[int] = []
    try:
        if stream:
            async for chunk in await client.completions.create(**given, stream=True):
                if not token_ids:
                    results.first_s = max(results.first_s, time.monotonic() - begun_s)
                for choice in chunk.choices:
                    token_ids += choice.model_dump()["token_ids"]
        else:
            answer = await client.completions.create(**given)
            token_ids = answer.choices[0].model_dump()["token_ids"]
    except (openai.OpenAIError, httpx.HTTPError) as error:
        results.errors.append(f"{type(error).__name__}: {error}")
        return
    results.answers += 1
    results.wrong += token_ids != expected.token_ids[:tokens]


async def measure(url: str, expected: Mapping[str, list[Expected]], clients: int, seconds: float) -> dict[str, Results]:
    """Asks all models for this long."""
    results = {name: Results() for name in expected}
    end_s = time.monotonic() + seconds

    async def ask_for_long(client: openai.AsyncOpenAI, name: str) -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(random.expovariate(1 / PAUSE_S))
            await ask(client, name, random.choice(expected[name]), random.random() < 0.8, results[name])

    directory = ClusterDir("default")
    state = directory.read()
    assert state is not None
    secret = read_secret(Path(state.secret_file))
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client,
        Redis(unix_socket_path=str(directory.redis_socket)) as redis,
    ):
        watch = Watch(Ledger(redis, "default", secret, socket.gethostname()), results)
        over = asyncio.Event()
        async with asyncio.TaskGroup() as watches:
            watches.create_task(watch.run(over))
            async with asyncio.TaskGroup() as asks:
                for name in expected:
                    for _ in range(clients):
                        asks.create_task(ask_for_long(client, name))
            over.set()
    return results


def show(results: Mapping[str, Results]) -> bool:
    """Prints the table; returns whether all is as it must be."""
    columns = ["model", "answers", "failed", "wrong", "wakes", "longest wait for a wake, s", "promised then, s", "late"]
    columns += ["displaced", "before min_runtime", "parked streams", "longest TTFT, s"]
    rows = [
        [
            f"{name} (popular)" if name == POPULAR else name,
            str(one.answers),
            str(len(one.errors)),
            str(one.wrong),
            str(one.wakes),
            f"{one.wait_s:.1f}",
            f"{one.promised_s:.1f}",
            str(one.late),
            str(one.displaced),
            str(one.early),
            str(one.parked),
            f"{one.first_s:.1f}",
        ]
        for name, one in results.items()
    ]
    for row in (columns, ["---"] * len(columns), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    for name, one in results.items():
        for error in sorted(set(one.errors))[:5]:
            sys.stdout.write(f"{name}: {one.errors.count(error)} x {error}\n")
    broken = any(one.errors or one.wrong or one.late or one.early for one in results.values())
    return not broken and not results[POPULAR].displaced and any(one.parked for one in results.values())


def run(
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes under load.")] = 20.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients of each model.")] = 2,
    residency: Annotated[str, typer.Option(help="As the setting.")] = "rule",
) -> None:
    """Serve four models in the memory of two, and check every token."""
    directory = Path(tempfile.mkdtemp(prefix="cpd-four-", dir="/tmp"))  # sockets need short names
    os.environ |= {"CPD_RUNTIME_DIR": str(directory / "run"), "XDG_STATE_HOME": str(directory / "state")}
    right = False
    try:
        expected = make_models(directory)
        started = cpd("up", "--detach", "--config", str(write_settings(directory, residency)))
        try:
            url = started[started.index("http") :].split()[0]
            results = asyncio.run(measure(url, expected, clients, 60 * minutes))
        finally:
            cpd("down")
        right = show(results)
    finally:
        if right:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            sys.stderr.write(f"The logs of the cluster are in {directory}\n")
    sys.exit(not right)


def cpd(*arguments: str) -> str:
    """Runs a command, and returns what it prints."""
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"cpd {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    typer.run(run)
