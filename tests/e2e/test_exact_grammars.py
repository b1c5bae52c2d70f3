"""A document has the same tokens alone, in a batch, on both routes, and when its worker dies in the middle of it."""

import asyncio
import importlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from models import tiny
from tests.e2e.client import MODEL, Answer, client, complete
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "subscription_renewal_status": {"enum": ["renewed_automatically", "cancelled_by_customer", "payment_failed"]},
        "remarks_of_the_customer": {"type": "array", "items": {"type": "string", "minLength": 20}, "minItems": 5},
        "assigned_support_department": {"enum": ["technical_assistance", "billing_department", "general_questions"]},
    },
    "required": ["subscription_renewal_status", "remarks_of_the_customer", "assigned_support_department"],
    "additionalProperties": False,
}
PROMPTS = [[20 + (7 * i + place) % 400 for place in range(length)] for i, length in enumerate((10, 100) * 8)]
TRIES = 4
BOMBS: list[dict[str, Any]] = [
    {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]}},
    {"guided_json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"}},
    {"guided_json": {"type": "string", "pattern": "^(((a{99}){99}){99})b?$"}},
    {"guided_regex": "(.*a){25}"},
    {"guided_regex": "([a-z]{1,50}[0-9]?){1,60}Z"},
    {"guided_grammar": "start: A B\nA: /a+/\nB: /a+/"},
]
"""Grammars that are made to take long; the last one has one text that never ends."""


def asked(seed: int, max_tokens: int = 300) -> dict[str, Any]:
    return {"guided_json": SCHEMA, "temperature": 1, "ignore_eos": False, "seed": seed, "max_tokens": max_tokens}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings: dict[str, Any] = {"model": str(tiny.CHECKPOINT), "served_model_name": MODEL, "combined": 2}
    with Cluster(**settings, long_prefill_tokens=64, kv_memory="64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def local_url(cluster: Cluster) -> str:
    """A router that sends no prompt to the prefill worker."""
    return cluster.add_router(long_prefill_tokens=4096)


async def one_by_one(url: str, count: int) -> list[Answer]:
    async with client(url) as http:
        return [await complete(http, prompt, **asked(seed)) for seed, prompt in enumerate(PROMPTS[:count])]


async def test_documents_are_the_same_alone_in_a_batch_and_on_both_routes(cluster: Cluster, local_url: str) -> None:
    remote = await one_by_one(cluster.url, len(PROMPTS))
    assert {answer.route for answer in remote} == {"local", "remote"}
    for answer in remote:
        assert answer.finish == "stop"
        importlib.import_module("jsonschema").validate(json.loads(answer.text), SCHEMA)
    local = await one_by_one(local_url, 4)
    assert {answer.route for answer in local} == {"local"}
    assert [answer.token_ids for answer in local] == [answer.token_ids for answer in remote[:4]]
    for url in (local_url, cluster.url):
        async with client(url) as http:
            batch = [complete(http, prompt, stream=True, **asked(seed)) for seed, prompt in enumerate(PROMPTS)]
            together = await asyncio.gather(*batch)
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in remote]


@pytest.mark.parametrize(("events", "logprobs"), [(1, 1), (6, None), (40, None), (40, 1)])
async def test_a_document_goes_on_with_the_same_tokens_when_its_worker_dies(
    cluster: Cluster, events: int, logprobs: int | None
) -> None:
    """With log-probabilities, a run of forced tokens comes one token at a time, so the worker may die within it."""
    seed, prompt = events, PROMPTS[events % 2]
    fields = asked(seed) | {"logprobs": logprobs}
    async with client(cluster.url) as http:
        undisturbed = await complete(http, prompt, **asked(seed))
        for attempt in range(TRIES):
            name = f"{events}-{logprobs}-{attempt}"
            disturbed = await _disturbed(cluster, prompt, fields, events, name)
            assert disturbed.token_ids == undisturbed.token_ids
            assert disturbed.text == undisturbed.text
            if len((await http.get(f"/requests/{name}")).json()["placements"]) > 1:
                return
    pytest.fail("all answers were complete before their workers were killed")


async def _disturbed(cluster: Cluster, prompt: list[int], fields: dict[str, Any], events: int, name: str) -> Answer:
    """The answer to a stream whose worker is killed after some events.

    Args:
        name: The id of the request.
    """
    worker, count = "", 0

    def on_begin(began: str) -> None:
        nonlocal worker
        worker = began

    def on_event() -> None:
        nonlocal count
        count += 1
        if count == events:
            os.kill(cluster.pid(worker), signal.SIGKILL)

    async with client(cluster.url) as http:
        answer = await complete(
            http,
            prompt,
            stream=True,
            headers={"x-request-id": name},
            on_begin=on_begin,
            on_event=on_event,
            **fields,
        )
    await asyncio.to_thread(cluster.wait_until_healthy)
    return answer


async def test_grammars_that_are_made_to_take_long_stop_no_stream(cluster: Cluster) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "temperature": 1, "seed": 5}
    async with client(cluster.url) as http:
        alone = [await complete(http, prompt, **fields) for prompt in PROMPTS[:4]]
        streams = [asyncio.create_task(complete(http, prompt, stream=True, **fields)) for prompt in PROMPTS[:4]]
        for bomb in BOMBS:
            body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 50, "seed": 1, **bomb}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["param"] in bomb
        assert [(await stream).token_ids for stream in streams] == [answer.token_ids for answer in alone]
        assert (await complete(http, PROMPTS[0], **asked(1))).finish == "stop"
