"""`/tokenize` and `/detokenize`."""

import logging
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually

TEXT = "the quick fox: 你好 🙂"
CHAT = [{"role": "user", "content": "Hello?"}]


@pytest.fixture
async def router(start_router: StartRouter, start_worker: StartWorker, says: Says) -> Router:
    """A router with one worker."""
    return await start_router(await start_worker(says("fox")))


async def test_a_text_has_the_tokens_that_a_completion_has(router: Router) -> None:
    found = (await router.http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
    asked = {"model": "small-model", "prompt": TEXT, "max_tokens": 1, "return_token_ids": True}
    completion = (await router.http.post("/v1/completions", json=asked)).json()
    assert found["tokens"] == completion["choices"][0]["prompt_token_ids"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512


async def test_a_chat_has_the_tokens_that_an_answer_continues(router: Router) -> None:
    found = (await router.http.post("/tokenize", json={"model": "small-model", "messages": CHAT})).json()
    asked = {"model": "small-model", "messages": CHAT, "return_token_ids": True}
    answer = (await router.http.post("/v1/chat/completions", json=asked)).json()
    assert found["tokens"] == answer["prompt_token_ids"]
    assert found["token_strs"] is None


async def test_tokens_have_the_text_that_they_came_from(router: Router, tokenizer: Tokenizer) -> None:
    tokens = (await router.http.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False})).json()["tokens"]
    assert tokens == tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert (await router.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": TEXT}
    special = tokenizer.token_to_id("<|end|>")
    assert (await router.http.post("/detokenize", json={"tokens": [special]})).json() == {"prompt": "<|end|>"}
    assert (await router.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_keeps_its_nul_characters(router: Router) -> None:
    text = "HOME=/root\0PATH=/bin\0"
    asked = {"messages": [{"role": "user", "content": text}]}
    tokens = (await router.http.post("/tokenize", json=asked)).json()["tokens"]
    assert text in (await router.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/tokenize", {}, 400, "missing_required_parameter"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, 400, "missing_required_parameter"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model_not_found"),
        ("/tokenize", {"prompt": ["x"]}, 400, "invalid_type"),
        ("/tokenize", {"messages": CHAT, "add_generation_prompt": False}, 400, "invalid_value"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"a": {}}}, 400, "invalid_type"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "missing_required_parameter"),
        (
            "/tokenize",
            {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "unsupported_parameter",
        ),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model_not_found"),
        ("/detokenize", {"tokens": [1], "unknown": 1}, 400, "unknown_parameter"),
    ],
)
async def test_wrong_requests_are_refused(
    router: Router, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    response = await router.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_they_need_a_key_and_are_logged_as_calls(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    router = await start_router(api_key=["one"])
    refused = await router.http.post("/tokenize", json={"prompt": TEXT}, headers={"authorization": "Bearer two"})
    assert refused.status_code == 401
    assert (await router.http.post("/tokenize", json={"prompt": TEXT})).json()["max_model_len"] is None

    def outcomes() -> list[Any]:
        return [record.__dict__["fields"]["outcome"] for record in caplog.records if record.name == "router.access"]

    async def logged() -> bool:
        return len(outcomes()) == 2

    await eventually(logged)
    assert outcomes() == ["error", "completed"]


async def test_other_servers_names_of_the_health_check_need_no_key(start_router: StartRouter) -> None:
    router = await start_router(api_key=["one"])
    for path in ("/health", "/ping"):
        response = await router.http.get(path, headers={"authorization": ""})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")
    assert (await router.http.get("/version", headers={"authorization": ""})).status_code == 401
    assert (await router.http.get("/version")).json().keys() == {"version"}
