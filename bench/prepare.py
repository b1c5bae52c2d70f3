"""Prepares a measurement: finds the server and its model, sends trial requests, and learns how it counts tokens."""

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.client.client import Client
from bench.client.target import Target
from bench.errors import BenchError
from bench.record import Failure, Record
from bench.settings import TargetSettings
from bench.tokens import Texts, measure
from bench.workloads.base import Message

_TRIES = 4  # of a trial request, because a server may fail some
_ANSWERED = ("", Failure.EMPTY, Failure.INCOMPLETE)  # errors of a trial request that was served all the same
_REDIRECTS = "give the address that it redirects to with --url, such as one with https"
_SNAPSHOT_S = 5.0  # time limit; figures wait for the snapshot after a run


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs of a measurement besides its settings.

    Args:
        target: The server and its model.
        texts: Makes prompts.
        seed: The given seed, or a random one.
        warnings: Warnings to show before the figures.
    """

    target: Target
    texts: Texts
    seed: int
    warnings: tuple[str, ...]


def prepare(settings: TargetSettings) -> Prepared:
    """Checks that the server answers, with trial requests that count in no figure.

    Raises:
        BenchError: The server cannot be reached, lists no model, or refuses the request.
        ConfigError: A setting is invalid.
    """
    return asyncio.run(_prepare(settings))


def cluster_snapshot(target: Target) -> dict[str, Any] | None:
    """The server's `/cluster` if it is a cpd router, else None."""

    async def ask() -> dict[str, Any] | None:
        client = Client(replace(target, timeout_s=min(_SNAPSHOT_S, target.timeout_s)))
        try:
            status, body = await client.get_json("/cluster")
        except BenchError:
            return None
        finally:
            await client.close()
        return body if status == 200 and isinstance(body, dict) else None

    return asyncio.run(ask())


async def _prepare(settings: TargetSettings) -> Prepared:
    target = Target.of(settings, settings.model or await _first_model(Target.of(settings, "")))
    tokenizer = Path(settings.tokenizer) if settings.tokenizer else None
    seed = settings.seed if settings.seed is not None else int.from_bytes(os.urandom(4), "big")
    client = Client(target)
    warnings = []

    async def ask(text: str) -> int | None:
        trial = await _trial(client, target, text)
        if trial.prompt_tokens is None and tokenizer is None and trial.error not in _ANSWERED:
            raise BenchError(f"trial requests fail ({trial.error}: {trial.detail}): try again when the server is well")
        return trial.prompt_tokens

    try:
        first = await _trial(client, target, "hello")
        if first.prompt_tokens is not None or tokenizer is not None:
            texts = await measure(ask, tokenizer)
        else:
            texts = Texts.measured(tokens_per_word=1.0, overhead=0)
            warnings.append(_without_counts(first))
    finally:
        await client.close()
    return Prepared(target, texts, seed, tuple(warnings))


async def _first_model(target: Target) -> str:
    client = Client(target)
    try:
        status, body = await client.get_json("/v1/models")
    finally:
        await client.close()
    if status == 401:
        raise BenchError("the server requires a key: give it with --api-key")
    if 300 <= status < 400:
        raise BenchError(f"the server redirects {target.url}/v1/models (HTTP {status}): {_REDIRECTS}")
    try:
        return str(body["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise BenchError(f"{target.url}/v1/models lists no model (HTTP {status}): name one with --model") from None


async def _trial(client: Client, target: Target, text: str) -> Record:
    """Sends a request for one token, several times if it fails.

    Raises:
        BenchError: There is no connection, no answer in time, or the server refuses the request.
    """
    for _ in range(_TRIES):
        now_s = time.perf_counter()
        record = Record(session=0, turn=0, input_len=0, output_len=1, due_s=now_s, sent_s=now_s)
        await client.stream(record, [Message("user", text)])
        if record.status == 0 or record.error == Failure.TIMEOUT:
            raise BenchError(f"no answer from {target.url}: {record.detail or record.error}")
        if 300 <= record.status < 500 and record.status not in (408, 429):
            raise BenchError(_refusal(record, target))
        if record.prompt_tokens is not None:
            break
    return record


def _without_counts(trial: Record) -> str:
    if trial.error not in _ANSWERED:
        return f"trial requests fail ({trial.error}: {trial.detail}); prompt lengths will be in words"
    return (
        "the server reports no token counts (no usage): prompt lengths are in words, and output tokens are unknown; "
        "give the directory of the model's tokenizer with --tokenizer"
    )


def _refusal(record: Record, target: Target) -> str:
    if record.status < 400:
        return f"the server redirects a trial request (HTTP {record.status}): {_REDIRECTS}"
    hint = ""
    if record.status == 401:
        hint = "; give the key with --api-key"
    elif target.ignore_eos and "ignore_eos" in record.detail:
        hint = "; try --no-ignore-eos"
    return f"the server refuses a trial request with HTTP {record.status}: {record.detail}{hint}"
