"""`/openapi.json` and `/docs` are complete, true, and load nothing from another host."""

import importlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from fastapi.openapi.models import OpenAPI
from pydantic import TypeAdapter

from router.api.anthropic_messages.documents import MessageDocument
from router.api.anthropic_messages.request import CountTokensRequest, MessagesRequest
from router.api.anthropic_messages.routes import MESSAGES_TYPES
from router.api.openai_responses.documents import ResponseDocument
from router.api.openai_responses.request import ResponsesRequest
from router.api.openai_responses.routes import RESPONSES_TYPES
from router.api.parse import parse_body
from router.api.responses import ChatCompletion
from router.api.schemas import ChatRequest, CompletionRequest, parse
from router.api.strict_model import Body
from router.errors import ApiError
from tests.router.api.conftest import CALL, Start
from tests.router.api.tool_models import MODEL
from tests.router.conftest import Router, Says, StartRouter, StartWorker

CHAT: dict[str, Any] = {"model": "small-model", "messages": [{"role": "user", "content": "Hello?"}]}
TEXT: dict[str, Any] = {"model": "small-model", "prompt": "Hello?", "max_tokens": 50}
CALLS = (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT))

FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": None, "stop": None, "unknown": None},
    {"user": "me", "metadata": {"a": 1}},
    {"tools": [], "best_of": 1, "echo": False},
    {"messages": [{"type": "text", "role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}], "annotations": [1]}]},
    {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]},
    {"tools": [{}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}]},
    {"tools": [{"type": "function", "function": {"name": "f g"}}]},
    {"tool_choice": "auto", "parallel_tool_calls": False},
    {"tool_choice": "always"},
    {"tool_choice": {"type": "function"}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
    {"reasoning_effort": "low"},
    {"reasoning_effort": "much"},
    {"reasoning_effort": None},
    {"echo": 0},
    {"best_of": True},
    {"echo": True},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"stop": [""]},
    {"stop": ["x"] * 32},
    {"stop": ["x"] * 33},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": None}},
    {"stream_options": {"other": 1}},
    {"temperature": 2},
    {"temperature": 2.1},
    {"n": 0},
    {"n": "1"},
    {"seed": -(1 << 63)},
    {"logit_bias": {"1": 100}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": None}},
    {"logit_bias": {"x": 1}},
    {"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "priority": -100},
    {"priority": 101},
    {"stop_token_ids": [1, 2], "include_stop_str_in_output": True},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [1] * 65},
    {"skip_special_tokens": True, "add_generation_prompt": True, "length_penalty": 1.0, "use_beam_search": False},
    {"skip_special_tokens": False},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object", "json_schema": None}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    {"response_format": {"type": "xml"}},
    {"structured_outputs": {"json": "{}", "regex": None}},
    {"structured_outputs": {"other": 1}},
    {"guided_json": {"const": None}},
    {"guided_json": 1},
    {"guided_regex": "a", "guided_choice": None},
    {"guided_choice": [1]},
    {"add_generation_prompt": False},
    {"unknown": 1},
    {"model": None},
)
RESPONSE_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"input": [{"role": "user", "content": "x"}], "unknown": None},
    {"input": [{"type": None, "role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [{"type": "reasoning", "summary": []}, {"type": "function_call", "call_id": "c", "name": "f"}]},
    {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"}]},
    {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}]},
    {"input": [{"type": "computer_call"}]},
    {"input": ["x"]},
    {"input": []},
    {"input": 1},
    {"tools": [{"type": "function", "name": "f", "parameters": None, "strict": None}]},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"name": "f"}]},
    {"tool_choice": "auto"},
    {"tool_choice": {"type": "function", "name": "f"}},
    {"tool_choice": {"type": "mcp"}},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"const": None}}}},
    {"text": {"format": {"type": "json_schema", "name": "a"}}},
    {"text": {"format": {"type": "xml"}}},
    {"text": {"verbosity": "low"}},
    {"reasoning": {"effort": "max", "summary": "auto"}},
    {"reasoning": {"effort": "much"}},
    {"background": False, "truncation": "disabled", "top_logprobs": 0, "user": 1},
    {"background": True},
    {"conversation": "x"},
    {"metadata": {"a": "b"}},
    {"metadata": {"a": 1}},
    {"include": ["reasoning.encrypted_content"]},
    {"include": ["other"]},
    {"max_output_tokens": 0},
    {"stream": True, "stream_options": {"include_obfuscation": True}},
    {"model": None},
)
MESSAGE_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"tools": [{"name": "f", "input_schema": {}, "defer_loading": False, "allowed_callers": ["direct"]}]},
    {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["direct", "direct"], "input_examples": [1]}]},
    {"max_tokens": None},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "y"}}]}]},
    {
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": None}}]}
        ]
    },
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": None}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"system": [{"type": "text", "text": "x"}]},
    {"system": [{"type": "text", "text": "x", "citations": [1]}]},
    {"tools": [{"name": "f", "input_schema": {"type": "object", "default": None}, "type": None}]},
    {"tools": [{"name": "f"}]},
    {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {"tool_choice": {"type": "all"}},
    {"tool_choice": "any"},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "between_tools"}},
    {"output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {}}}},
    {"output_config": {"effort": "none"}},
    {"stop_sequences": ["x"], "top_k": 5, "temperature": 1, "service_tier": 1, "speed": "standard"},
    {"stop_sequences": [""]},
    {"speed": "fast"},
    {"context_management": {"edits": []}, "mcp_servers": []},
    {"context_management": {}},
    {"n": 1},
)
PROMPTS: tuple[Any, ...] = ("a", ["a", "b"], [1, 2], [[1, 2], [3]], [], [""], [[]], [1, "a"], [-1], 3, [1 << 31], None)

METHODS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("post",),
    "/v1/completions": ("post",),
    "/v1/responses": ("post",),
    "/v1/responses/{response_id}": ("get", "delete"),
    "/v1/messages": ("post",),
    "/v1/messages/count_tokens": ("post",),
    "/tokenize": ("post",),
    "/detokenize": ("post",),
    "/v1/models": ("get",),
    "/v1/models/{name}": ("get",),
    "/livez": ("get",),
    "/readyz": ("get",),
    "/health": ("get",),
    "/ping": ("get",),
    "/version": ("get",),
    "/metrics": ("get",),
    "/metrics/targets": ("get",),
    "/cluster": ("get",),
    "/cluster/drain": ("post",),
    "/cluster/sleep": ("post",),
    "/cluster/wake": ("post",),
    "/cluster/pin": ("post",),
    "/cluster/scale": ("post",),
    "/session": ("get",),
    "/usage": ("get",),
    "/requests/{request_id}": ("get",),
}

MESSAGE: dict[str, Any] = {
    "model": "small-model",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Hello?"}],
}
RESPONSE: dict[str, Any] = {"model": "small-model", "input": "Hello?"}


@pytest.fixture
async def router(start_router: StartRouter, start_worker: StartWorker, says: Says) -> Router:
    """A router with one worker and an API key."""
    return await start_router(await start_worker(says("the fox: 你好")), api_key=["one"])


@pytest.fixture
async def document(router: Router) -> dict[str, Any]:
    """`/openapi.json`, asked for without a key."""
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        answer: dict[str, Any] = (await client.get("/openapi.json")).raise_for_status().json()
        return answer


def _closed(value: Any) -> Any:
    """A schema in which objects have no more than their properties."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    extra = {"additionalProperties": False} if "properties" in value else {}
    return {**extra, **{key: _closed(item) for key, item in value.items()}}


def _fits(document: dict[str, Any], schema: dict[str, Any], value: Any, *, closed: bool = False) -> bool:
    """Returns whether a value is valid by a schema of the document."""
    components = document["components"]
    whole = schema | {"components": _closed(components) if closed else components}
    valid: bool = importlib.import_module("jsonschema").Draft202012Validator(whole).is_valid(value)
    return valid


def _response(
    document: dict[str, Any], path: str, media_type: str, status: str = "200", method: str = ""
) -> dict[str, Any]:
    operation = document["paths"][path][method or METHODS[path][0]]
    schema: dict[str, Any] = operation["responses"][status]["content"][media_type]["schema"]
    return schema


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All paths with each of their operations."""
    for path, item in document["paths"].items():
        yield from ((path, item[method]) for method in METHODS[path])


def _chunk(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    schema: dict[str, Any] = content["itemSchema"]["properties"]["data"]["contentSchema"]
    return schema


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (item for key, item in value.items() if key == "$ref")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _refs(item)


def test_it_is_valid_openapi_and_names_every_route(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    OpenAPI.model_validate(document)
    assert {path: tuple(item) for path, item in document["paths"].items()} == METHODS
    schemas = document["components"]["schemas"]
    assert set(_refs(document)) <= {f"#/components/schemas/{name}" for name in schemas}
    assert "HTTPValidationError" not in schemas
    operation_ids = [operation["operationId"] for _, operation in _operations(document)]
    assert len(set(operation_ids)) == len(operation_ids)


def test_it_says_which_routes_need_a_key(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"] == {
        "api_key": {"type": "http", "scheme": "bearer"},
        "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    assert document["security"] == [{"api_key": []}, {"x_api_key": []}]
    open_paths = {path for path, operation in _operations(document) if operation.get("security") == []}
    assert open_paths == {"/livez", "/readyz", "/health", "/ping"}
    for path, operation in _operations(document):
        responses = operation["responses"]
        assert ("401" in responses) == ("421" in responses) == (path not in open_paths)
        assert ("415" in responses) == ("requestBody" in operation)


async def test_without_keys_no_route_needs_one(start_router: StartRouter) -> None:
    router = await start_router()
    assert (await router.http.get("/openapi.json")).json()["security"] == []


def _listed(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a path's body."""
    ref = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties: dict[str, Any] = document["components"]["schemas"][ref.rpartition("/")[2]]["properties"]
    return properties


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
    ],
)
def test_every_field_of_a_request_is_listed(document: dict[str, Any], path: str, kind: type[Body]) -> None:
    listed = _listed(document, path)
    assert listed.keys() == kind.model_fields.keys() | kind.HARMLESS | kind.PASSING.keys()
    for name in kind.model_fields:
        assert listed[name]["description"].endswith("."), name


@pytest.mark.parametrize("path", [path for path, _ in CALLS])
def test_what_fields_without_effect_may_be_is_listed(document: dict[str, Any], path: str) -> None:
    listed, operation = _listed(document, path), document["paths"][path]["post"]
    assert listed["user"]["description"].startswith("Accepted and ignored")
    assert listed["functions"]["enum"] == [[], None]
    assert "anyOf" in listed["priority"]
    assert "Extension" in listed["priority"]["description"]
    names = {parameter["name"] for parameter in operation["parameters"]}
    assert names == {"x-request-id", "x-request-timeout-ms", "x-cpd-ticks"}


@pytest.mark.parametrize(
    ("kind", "body", "cases"),
    [(ResponsesRequest, RESPONSE, RESPONSE_FIELDS), (MessagesRequest, MESSAGE, MESSAGE_FIELDS)],
)
def test_the_schemas_of_dialects_accept_the_same_as_the_router(
    document: dict[str, Any], kind: type[Body], body: dict[str, Any], cases: tuple[dict[str, Any], ...]
) -> None:
    for fields in cases:
        try:
            parse_body(orjson.dumps(body | fields), kind)
            taken = True
        except ApiError:
            taken = False
        assert _fits(document, {"$ref": f"#/components/schemas/{kind.__name__}"}, body | fields) == taken, fields


def test_the_schema_of_requests_accepts_the_same_as_the_router(document: dict[str, Any]) -> None:
    kinds: tuple[type[ChatRequest | CompletionRequest], ...] = (ChatRequest, CompletionRequest)
    cases = [(kind, body | fields) for kind, (_, body) in zip(kinds, CALLS, strict=True) for fields in FIELDS]
    cases += [(CompletionRequest, {"model": "m", "prompt": prompt}) for prompt in PROMPTS]
    kwargs: tuple[Any, ...] = ({"a": 1, "b": "x", "c": True, "d": 0.5, "e": None}, {"a": {}}, {"a": [1]}, [])
    cases += [(ChatRequest, CHAT | {"chat_template_kwargs": variables}) for variables in kwargs]
    for kind, body in cases:
        try:
            parse(orjson.dumps(body), kind, max_n=4)
            taken = True
        except ApiError:
            taken = False
        assert _fits(document, {"$ref": f"#/components/schemas/{kind.__name__}"}, body) == taken, body


async def test_responses_and_chunks_are_as_described(router: Router, document: dict[str, Any]) -> None:
    for (path, body), ids, scored in itertools.product(CALLS, (False, True), (False, True)):
        logprobs: dict[str, Any] = {}
        if scored:
            logprobs = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
        asked = body | logprobs | {"return_token_ids": ids}
        whole = (await router.http.post(path, json=asked)).raise_for_status()
        assert _fits(document, _response(document, path, "application/json"), whole.json(), closed=True), whole.text
        headers = document["paths"][path]["post"]["responses"]["200"]["headers"]
        assert {name for name in whole.headers if name.startswith("x-")} <= headers.keys()
        usage = {"include_usage": True}
        for options in ({}, {"stream_options": usage}, {"stream_options": usage | {"continuous_usage_stats": True}}):
            stream = await router.http.post(path, json=asked | {"stream": True} | options)
            *events, done, rest = stream.text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            for event in events:
                chunk = json.loads(event.removeprefix("data: "))
                assert _fits(document, _chunk(document, path), chunk, closed=True), event


async def test_what_dialects_send_is_as_described(start: Start) -> None:
    router = await start("hermes-tools", f"<think>Hm.</think>Let me look.\n{CALL}", store_responses=60)
    document = (await router.http.get("/openapi.json")).json()
    tool = {"name": "get_weather", "description": "x"}
    message = MESSAGE | {"tools": [tool | {"input_schema": {"type": "object"}}]}
    response = RESPONSE | {"tools": [tool | {"type": "function"}], "metadata": {"a": "b"}}
    for path, body, limit in (
        ("/v1/responses", response, "max_output_tokens"),
        ("/v1/messages", message, "max_tokens"),
    ):
        for tokens in (60, 500):
            asked = body | {"model": MODEL, limit: tokens}
            whole = (await router.http.post(path, json=asked)).raise_for_status()
            assert _fits(document, _response(document, path, "application/json"), whole.json(), closed=True), whole.text
            headers = document["paths"][path]["post"]["responses"]["200"]["headers"]
            assert {name for name in whole.headers if name.startswith("x-")} <= headers.keys()
            stream = await router.http.post(path, json=asked | {"stream": True})
            *events, rest = stream.text.split("\n\n")
            assert rest == ""
            for event in events:
                data = json.loads(event.partition("\ndata: ")[2])
                assert _fits(document, _chunk(document, path), data, closed=True), event
        wrong = await router.http.post(path, json={})
        assert _fits(document, _response(document, path, "application/json", "400"), wrong.json(), closed=True)
    stored = (await router.http.post("/v1/responses", json=RESPONSE | {"model": MODEL})).json()
    path = "/v1/responses/{response_id}"
    for method in ("get", "delete", "get"):
        answer = await router.http.request(method, f"/v1/responses/{stored['id']}")
        schema = _response(document, path, "application/json", str(answer.status_code), method)
        assert _fits(document, schema, answer.json(), closed=True), answer.text
    counted = await router.http.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": MESSAGE["messages"]}
    )
    schema = _response(document, "/v1/messages/count_tokens", "application/json")
    assert _fits(document, schema, counted.raise_for_status().json(), closed=True)


def test_types_of_one_name_are_the_same() -> None:
    kinds = (*RESPONSES_TYPES, *MESSAGES_TYPES, ResponseDocument, MessageDocument, ChatRequest, ChatCompletion)
    inputs: Any = [(kind, "validation", TypeAdapter(kind)) for kind in kinds]
    _, schemas = TypeAdapter.json_schemas(inputs)
    assert not [name for name in schemas["$defs"] if "__" in name]


async def test_other_documents_are_as_described(router: Router, document: dict[str, Any]) -> None:
    await router.http.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine"})
    for path, body in (("/tokenize", {"prompt": "a", "return_token_strs": True}), ("/detokenize", {"tokens": [1]})):
        answer = (await router.http.post(path, json=body)).raise_for_status().json()
        assert _fits(document, _response(document, path, "application/json"), answer, closed=True), path
    for path in (path for path, methods in METHODS.items() if methods == ("get",) and path != "/metrics"):
        real = path.replace("{name}", "small-model").replace("{request_id}", "mine")
        answer = (await router.http.get(real)).raise_for_status().json()
        assert _fits(document, _response(document, path, "application/json"), answer, closed=True), path
    responses = document["paths"]["/metrics"]["get"]["responses"]
    types = {status: list(response["content"]) for status, response in responses.items()}
    assert types.pop("200") == ["text/plain"]
    assert set(map(tuple, types.values())) == {("application/json",)}


async def test_errors_are_as_described(router: Router, document: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as stranger:
        for client, method, path, status in (
            (stranger, "GET", "/cluster", 401),
            (stranger, "POST", "/v1/completions", 401),
            (router.http, "POST", "/v1/completions", 415),
            (router.http, "GET", "/v1/models/other", 404),
            (router.http, "GET", "/requests/other", 404),
            (router.http, "GET", "/nowhere", 404),
            (router.http, "GET", "/static-offline-docs/nowhere", 404),
            (router.http, "GET", "/v1/completions", 405),
            (router.http, "POST", "/cluster", 405),
            (router.http, "POST", "/v1/models/small-model", 405),
        ):
            response = await client.request(method, path)
            assert response.status_code == status, path
            schema = _response(document, "/livez", "application/json", "default")
            assert _fits(document, schema, response.json(), closed=True), response.text


async def test_the_docs_need_no_key_and_no_other_host(router: Router) -> None:
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        page = (await client.get("/docs")).raise_for_status().text
        assert not re.findall(r"""(?:src|href)=["'](?:\w+:)?//""", page)
        assert "url: '/openapi.json'" in page
        assert '"validatorUrl": null' in page
        assets = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
        assert len(assets) == 3
        for asset in assets:
            response = (await client.get(asset)).raise_for_status()
            assert response.content


async def test_a_head_request_is_answered_as_a_get_without_a_body(router: Router) -> None:
    for path, status in (("/livez", 200), ("/readyz", 200), ("/v1/models", 200), ("/v1/completions", 405)):
        response = await router.http.head(path)
        assert (response.status_code, response.content) == (status, b"")
