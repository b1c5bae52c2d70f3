"""The fields that constrain an output: what they become for workers, and what is refused."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from cpd.grammar.grammar import MAX_BYTES, Grammar
from cpd.rpc import cpd_pb2 as pb
from router.api.schemas import ChatRequest, CompletionRequest, parse
from router.api.structured import Fields, grammar_of
from router.errors import ApiError
from tests.router.conftest import Router, Says, StartRouter, StartWorker
from tests.router.fake_worker import Answer, FakeWorker, outputs

CHAT: dict[str, Any] = {"model": "small-model", "messages": [{"role": "user", "content": "Hello?"}]}
TEXT: dict[str, Any] = {"model": "small-model", "prompt": [1] * 40, "max_tokens": 50}
SCHEMA = {"type": "object", "properties": {"a": {"const": None}, "b": {"enum": ["x", None]}}, "required": ["a"]}
ABLE = {"grammars": True}
Kind = pb.Grammar.Kind


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}}


ASKED: list[tuple[dict[str, Any], pb.Grammar.Kind.ValueType, Any]] = [
    (response_format(SCHEMA, strict=True, description=None), Kind.KIND_JSON_SCHEMA, SCHEMA),
    (response_format(SCHEMA, strict=None), Kind.KIND_JSON_SCHEMA, SCHEMA),
    ({"response_format": {"type": "json_object"}}, Kind.KIND_JSON_SCHEMA, {"type": "object"}),
    ({"response_format": {"type": "json_object", "json_schema": None}}, Kind.KIND_JSON_SCHEMA, {"type": "object"}),
    ({"guided_json": SCHEMA}, Kind.KIND_JSON_SCHEMA, SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, Kind.KIND_JSON_SCHEMA, SCHEMA),
    ({"guided_regex": "a+"}, Kind.KIND_REGEX, "a+"),
    ({"guided_choice": ["a", "b"]}, Kind.KIND_CHOICE, ["a", "b"]),
    ({"guided_grammar": 'root ::= "a"'}, Kind.KIND_EBNF, 'root ::= "a"'),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Kind.KIND_JSON_SCHEMA, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Kind.KIND_JSON_SCHEMA, SCHEMA),
    ({"structured_outputs": {"json_object": True}}, Kind.KIND_JSON_SCHEMA, {"type": "object"}),
    ({"structured_outputs": {"regex": "a+"}}, Kind.KIND_REGEX, "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Kind.KIND_CHOICE, ["a", "b"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Kind.KIND_EBNF, 'start: "a"'),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, Kind.KIND_REGEX, "a+"),
]


@pytest.mark.parametrize(("fields", "kind", "meaning"), ASKED)
@pytest.mark.parametrize(("request_type", "body"), [(ChatRequest, CHAT), (CompletionRequest, TEXT)])
def test_each_way_to_ask_becomes_a_grammar_and_nulls_in_schemas_stay(
    request_type: type[ChatRequest | CompletionRequest],
    body: dict[str, Any],
    fields: dict[str, Any],
    kind: pb.Grammar.Kind.ValueType,
    meaning: Any,
) -> None:
    found = grammar_of(parse(orjson.dumps(body | {"seed": None} | fields), request_type, max_n=4))
    assert found is not None
    _, grammar = found
    assert grammar.kind.value == kind
    assert (json.loads(grammar.text) if kind in (Kind.KIND_JSON_SCHEMA, Kind.KIND_CHOICE) else grammar.text) == meaning


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}]
)
def test_without_a_constraint_there_is_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(parse(orjson.dumps(CHAT | fields), ChatRequest, max_n=4)) is None


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "exactly if"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema", "exactly if"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "Missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "Missing",
    ),
    (response_format([]), "response_format.json_schema.schema", "dictionary"),
    (response_format({"type": "foo"}), "response_format.json_schema.schema", "foo"),
    (response_format({"not": {}}), "response_format.json_schema.schema", '"not".*leave them out'),
    (response_format({"enum": ["x" * 1000] * 1000}), "response_format.json_schema.schema", str(MAX_BYTES)),
    (response_format(nested(100)), "response_format.json_schema.schema", "levels deep"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": 5}, "guided_json", "string"),
    ({"guided_json": [{}]}, "guided_json", "string"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look ahead"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_choice": []}, "guided_choice", "choices"),
    ({"guided_choice": [""]}, "guided_choice", "empty"),
    ({"guided_choice": [1]}, "guided_choice[0]", "string"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"structured_outputs": {}}, "structured_outputs", "not null"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "not null"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "Unrecognized"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "Only one"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "Only one field.*'guided_regex'"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "Only one"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
]


async def test_what_can_not_be_followed_is_refused_before_it_is_placed(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    worker = await start_worker(says("fox"), hello=ABLE)
    router = await start_router(worker)
    for fields, param, reason in REFUSED:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):  # the second is remembered
            response = await router.http.post(path, json=body | fields)
            assert response.status_code == 400, fields
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert re.search(reason, error["message"]), error["message"]
    assert not worker.submits


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_large_schema_is_read_beside_the_event_loop(
    start_router: StartRouter,
    start_worker: StartWorker,
    says: Says,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    """A megabyte takes 50 ms, and no other stream should wait for it."""
    readers: list[threading.Thread] = []

    def read(request: Fields) -> tuple[str, Grammar] | None:
        readers.append(threading.current_thread())
        return grammar_of(request)

    monkeypatch.setattr("router.api.completions.grammar_of", read)
    router = await start_router(await start_worker(says("fox"), hello=ABLE))
    body = (CHAT if "chat" in path else TEXT) | {"guided_json": {"properties": {f"p{i}": {} for i in range(50_000)}}}
    response = await router.http.post(path, json=body)
    assert response.status_code == 400
    assert str(MAX_BYTES) in response.json()["error"]["message"]
    assert readers
    assert threading.current_thread() not in readers


async def test_the_grammar_reaches_the_worker(start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
    worker = await start_worker(says("fox"), hello=ABLE)
    router = await start_router(worker)
    for fields, kind, _ in ASKED:
        assert (await router.http.post("/v1/completions", json=TEXT | fields)).status_code == 200
        sent = worker.submits[-1].sampling
        assert sent.grammar.kind == kind
        assert list(sent.stop_token_ids)
    assert (await router.http.post("/v1/completions", json=TEXT)).status_code == 200
    assert not worker.submits[-1].sampling.HasField("grammar")


async def test_only_workers_that_follow_grammars_get_one(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    """Also as prefill workers."""
    older = [
        await start_worker(says("fox"), worker_id="older"),
        await start_worker(worker_id="older-prefill", kind="prefill"),
    ]
    able = await start_worker(says("fox"), worker_id="able", hello=ABLE)
    router = await start_router(*older, able, long_prefill_tokens=16)
    for _ in range(6):
        response = await router.http.post("/v1/completions", json=TEXT | {"guided_regex": "a"})
        assert response.status_code == 200
    assert len(able.submits) == 6
    assert not any(submit.prefill_candidates for submit in able.submits)


async def test_without_such_a_worker_it_is_refused(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    router = await start_router(await start_worker(says("fox")))
    response = await router.http.post("/v1/completions", json=TEXT | {"guided_regex": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_parameter"
    assert response.json()["error"]["param"] == "guided_regex"


async def test_a_replay_has_the_grammar_and_goes_to_a_worker_that_follows_it(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    stopped = asyncio.Event()

    async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
        for count, output in enumerate(outputs(submit, [[5] * 20])):
            if count == 3 and not stopped.is_set():
                stopped.set()
                await asyncio.Event().wait()
            yield output

    first = await start_worker(script, worker_id="first", hello=ABLE)
    router: Router = await start_router(first)
    asked = TEXT | {"guided_regex": "a+", "max_tokens": 10}
    asking = asyncio.create_task(router.http.post("/v1/completions", json=asked))
    await asyncio.wait_for(stopped.wait(), 30)
    second: FakeWorker = await start_worker(script, worker_id="second", hello=ABLE)
    older = await start_worker(says("fox"), worker_id="older")
    await router.knows(second, older)
    await first.kill()
    assert (await asking).json()["usage"]["completion_tokens"] == 10
    (submit,) = second.submits
    assert submit.sampling.grammar.text == "a+"
    assert len(submit.tokens) // 4 == submit.prompt_len + 3
    assert not older.submits


def test_an_error_names_every_field_that_constrains() -> None:
    body = CHAT | {"guided_regex": "a", "guided_choice": ["a"], "structured_outputs": {"json_object": True}}
    with pytest.raises(ApiError, match=r"structured_outputs.json_object.*guided_regex.*guided_choice"):
        grammar_of(parse(orjson.dumps(body), ChatRequest, max_n=4))
