import asyncio
import contextlib
import gzip
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from cpd.common.blocks import TOKEN_BYTES, extend_hashes, unpack_tokens
from cpd.rpc import cpd_pb2 as pb
from router.text.tokenizer import Tokenizer as PromptTokenizer
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually

MODEL = "small-model"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hello?", "max_tokens": 50}
JSON = {"content-type": "application/json"}
REPLY = "the quick brown fox: 你好 🙂"


@pytest.fixture
async def router(start_router: StartRouter, start_worker: StartWorker, says: Says) -> Router:
    """A router with one worker that answers REPLY for each choice."""
    return await start_router(await start_worker(says(REPLY)))


async def _events(router: Router, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream's events, parsed but for [DONE]."""
    response = await router.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    data = [event.removeprefix("data: ") for event in events]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def _error(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    error: dict[str, Any] = body["error"]
    return error


class TestChat:
    async def test_in_one_piece(self, router: Router, tokenizer: Tokenizer) -> None:
        response = await router.http.post("/v1/chat/completions", json=CHAT)
        body = response.json()
        assert response.headers["content-type"] == "application/json"
        assert body.pop("id").startswith("chatcmpl-")
        assert body.pop("created") > 1_700_000_000
        assert body.pop("system_fingerprint").startswith("fp_")
        prompt = len(tokenizer.encode("<|start|>user\nHello?<|end|>\n<|start|>assistant\n").ids)
        output = len(tokenizer.encode(REPLY).ids) + 1
        assert body == {
            "object": "chat.completion",
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": REPLY, "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
        }

    @pytest.mark.parametrize("usage", [False, True])
    async def test_as_a_stream_in_openais_order(self, router: Router, usage: bool) -> None:
        events = await _events(
            router, "/v1/chat/completions", CHAT | ({"stream_options": {"include_usage": True}} if usage else {})
        )
        assert events.pop() == "[DONE]"
        common = [{key: event.pop(key) for key in ("id", "created", "system_fingerprint")} for event in events]
        assert all(each == common[0] for each in common)
        assert all(event.pop("object") == "chat.completion.chunk" for event in events)
        assert all(event.pop("model") == MODEL for event in events)
        if usage:
            last = events.pop()
            assert last["choices"] == []
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
            assert last["usage"]["total_tokens"] > last["usage"]["completion_tokens"] > 0
        null = {"usage": None} if usage else {}
        plain = {"index": 0, "logprobs": None, "finish_reason": None}
        first, *content, final = events
        assert first == {"choices": [plain | {"delta": {"role": "assistant", "content": ""}}]} | null
        pieces = [event["choices"][0]["delta"]["content"] for event in content]
        assert content == [{"choices": [plain | {"delta": {"content": piece}}]} | null for piece in pieces]
        assert "".join(pieces) == REPLY
        assert len(pieces) > 3
        assert all(pieces)
        assert final == {"choices": [plain | {"delta": {}, "finish_reason": "stop"}]} | null

    async def test_with_the_official_client(self, router: Router) -> None:
        messages: Any = CHAT["messages"]
        whole = await router.client.chat.completions.create(model=MODEL, messages=messages)
        assert whole.choices[0].message.content == REPLY
        stream = await router.client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
        assert chunks[-1].usage == whole.usage

    async def test_several_choices(self, start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
        worker = await start_worker(says("the fox", "a lazy dog jumps"))
        router = await start_router(worker)
        body = (await router.http.post("/v1/chat/completions", json=CHAT | {"n": 2})).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [choice["message"]["content"] for choice in body["choices"]] == ["the fox", "a lazy dog jumps"]
        assert [submit.n for submit in worker.submits] == [2]
        *events, _ = await _events(router, "/v1/chat/completions", CHAT | {"n": 2})
        choices = [event["choices"][0] for event in events]
        for index, text in enumerate(["the fox", "a lazy dog jumps"]):
            own = [choice for choice in choices if choice["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content", "") for choice in own) == text
            assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]

    async def test_token_ids_on_request(self, router: Router, tokenizer: Tokenizer) -> None:
        prompt = tokenizer.encode("<|start|>user\nHello?<|end|>\n<|start|>assistant\n").ids
        output = [*tokenizer.encode(REPLY).ids, tokenizer.token_to_id("<|end|>")]
        asked = CHAT | {"return_token_ids": True}
        body = (await router.http.post("/v1/chat/completions", json=asked)).json()
        assert body["prompt_token_ids"] == prompt
        assert body["choices"][0]["token_ids"] == output
        *events, _ = await _events(router, "/v1/chat/completions", asked)
        assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
        assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == output

    async def test_logprobs(self, router: Router, tokenizer: Tokenizer) -> None:
        asked = CHAT | {"logprobs": True, "top_logprobs": 2}
        body = (await router.http.post("/v1/chat/completions", json=asked)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(token["bytes"]) for token in content).decode() == REPLY
        assert len(content) == len(tokenizer.encode(REPLY).ids)
        assert content[0]["token"] == "the"
        assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == -0.5
        assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
        assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}
        *events, _ = await _events(router, "/v1/chat/completions", asked)
        parts = [event["choices"][0]["logprobs"] or {"content": []} for event in events]
        assert [token for part in parts for token in part["content"]] == content
        without = (await router.http.post("/v1/chat/completions", json=CHAT | {"logprobs": True})).json()
        assert without["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    async def test_a_model_without_a_template_has_no_chat(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tmp_path: Any, tokenizer: Tokenizer
    ) -> None:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        router = await start_router(await start_worker(says(REPLY)), model=str(tmp_path), served_model_name="base")
        response = await router.http.post("/v1/chat/completions", json=CHAT | {"model": "base"})
        assert response.status_code == 400
        assert _error(response)["code"] == "no_chat_template"
        assert (
            await router.http.post("/v1/completions", json=TEXT | {"model": "base", "max_tokens": 3})
        ).status_code == 200


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_every_chunk_tells_the_usage_so_far_if_asked_to(router: Router, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, done = await _events(router, path, body | {"stream_options": options})
    assert done == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert events[-1] == events[-1] | {"choices": [], "usage": events[-2]["usage"]}
    assert "".join(event["choices"][0].get("text", "") for event in events[:-1]) in ("", REPLY)
    without = await _events(router, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in event for event in without[:-1])


class TestCompletions:
    async def test_in_one_piece(self, router: Router) -> None:
        body = (await router.http.post("/v1/completions", json=TEXT)).json()
        assert body["id"].startswith("cmpl-")
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": REPLY, "logprobs": None, "finish_reason": "stop"}]

    async def test_as_a_stream(self, router: Router) -> None:
        *events, done = await _events(router, "/v1/completions", TEXT | {"stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        *chunks, usage = events
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] > 0
        assert all(chunk["object"] == "text_completion" and chunk["usage"] is None for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == REPLY
        assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
        assert {choice["finish_reason"] for choice in choices[:-1]} == {None}

    async def test_the_default_is_sixteen_tokens(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        router = await start_router(await start_worker(says("fox " * 30)))
        body = (await router.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).json()
        assert body["usage"]["completion_tokens"] == 16
        assert body["choices"][0]["finish_reason"] == "length"

    async def test_several_prompts_of_text_or_tokens(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tokenizer: Tokenizer
    ) -> None:
        worker = await start_worker(says("the fox", "lazy"))
        router = await start_router(worker)
        texts = ["the dog", "over the lazy"]
        ids = [tokenizer.encode(text).ids for text in texts]
        answers = []
        for prompt in (texts, ids):
            asked = TEXT | {"prompt": prompt, "n": 2, "return_token_ids": True}
            answers.append((await router.http.post("/v1/completions", json=asked)).json())
        for answer in answers:
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert [choice["text"] for choice in answer["choices"]] == ["the fox", "lazy"] * 2
            assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids[0], ids[0], ids[1], ids[1]]
            assert answer["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
        assert [unpack_tokens(submit.tokens).tolist() for submit in worker.submits] == [*ids, *ids]

    @pytest.mark.parametrize("ids", [False, True])
    async def test_outputs_begin_with_their_prompts_on_request(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, tokenizer: Tokenizer, ids: bool
    ) -> None:
        router = await start_router(await start_worker(says("the fox", "lazy")))
        texts = ["the dog: 你", "over"]
        prompt = [tokenizer.encode(text).ids for text in texts] if ids else texts
        asked = TEXT | {"prompt": prompt, "n": 2, "echo": True, "return_token_ids": ids}
        body = (await router.http.post("/v1/completions", json=asked)).json()
        expected = [prompt + output for prompt in texts for output in ("the fox", "lazy")]
        assert [choice["text"] for choice in body["choices"]] == expected
        *events, _ = await _events(router, "/v1/completions", asked)
        streamed = ["", "", "", ""]
        for event in events:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == expected
        with_ids = [event["choices"][0] for event in events if "prompt_token_ids" in event["choices"][0]]
        assert [choice["text"] for choice in with_ids] == ([texts[0]] * 2 + [texts[1]] * 2 if ids else [])

    async def test_token_ids_in_the_stream(self, router: Router, tokenizer: Tokenizer) -> None:
        *events, _ = await _events(router, "/v1/completions", TEXT | {"return_token_ids": True})
        choices = [event["choices"][0] for event in events]
        assert choices[0]["prompt_token_ids"] == tokenizer.encode(TEXT["prompt"]).ids
        assert not any("prompt_token_ids" in choice for choice in choices[1:])
        output = [*tokenizer.encode(REPLY).ids, tokenizer.token_to_id("<|end|>")]
        assert [token for choice in choices for token in choice["token_ids"]] == output

    async def test_logprobs(self, router: Router, tokenizer: Tokenizer) -> None:
        logprobs = (await router.http.post("/v1/completions", json=TEXT | {"logprobs": 2})).json()["choices"][0][
            "logprobs"
        ]
        count = len(tokenizer.encode(REPLY).ids)
        assert {key: len(value) for key, value in logprobs.items()} == dict.fromkeys(
            ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
        )
        assert logprobs["tokens"][0] == "the"
        assert logprobs["token_logprobs"] == [-0.5] * count
        assert next(iter(logprobs["top_logprobs"][0].items())) == ("the", -0.5)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token.startswith("bytes:") or REPLY[offset:].startswith(token)
        chosen_only = (await router.http.post("/v1/completions", json=TEXT | {"logprobs": 0})).json()
        assert chosen_only["choices"][0]["logprobs"]["top_logprobs"][0] == {"the": -0.5}


class TestStopStrings:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_text_ends_before_it_and_the_worker_stops(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, stream: bool
    ) -> None:
        going_on = asyncio.Event()

        async def after(count: int) -> None:
            if count >= 6:
                await going_on.wait()

        worker = await start_worker(says("the quick brown fox jumps over the lazy dog", after=after))
        router = await start_router(worker)
        asked = CHAT | {"stop": ["k bro", "nowhere"]}
        if stream:
            *events, _ = await _events(router, "/v1/chat/completions", asked)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            finish = events[-1]["choices"][0]["finish_reason"]
        else:
            choice = (await router.http.post("/v1/chat/completions", json=asked)).json()["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert (text, finish) == ("the quic", "stop")
        await eventually(lambda: _told(worker.aborts))
        assert list(worker.aborts[0].choices) == [0]
        going_on.set()


async def _told(aborts: list[pb.Abort]) -> bool:
    return bool(aborts)


class TestSampling:
    async def _submitted(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, **fields: Any
    ) -> pb.Submit:
        worker = await start_worker(says("fox"))
        router = await start_router(worker)
        response = await router.http.post("/v1/chat/completions", json=CHAT | fields)
        assert response.status_code == 200, response.text
        return worker.submits[0]

    async def test_fields_are_sent_to_the_worker(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        submit = await self._submitted(
            start_router,
            start_worker,
            says,
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"5": -100},
            seed=42,
            logprobs=True,
            top_logprobs=3,
            max_completion_tokens=9,
            min_tokens=2,
        )
        assert submit.sampling == pb.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={5: -100},
            seed=42,
            top_logprobs=3,
            max_tokens=9,
            min_tokens=2,
            stop_token_ids=[1],
        )

    async def test_the_defaults(self, start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
        submit = await self._submitted(start_router, start_worker, says)
        sampling = submit.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1, 1, 0, 1)
        assert not sampling.HasField("top_logprobs")
        assert sampling.max_tokens == 512 - submit.prompt_len
        assert 0 < sampling.seed < 1 << 63

    async def test_the_models_own_defaults(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, model_dir: Path, tmp_path: Path
    ) -> None:
        model = Path(shutil.copytree(model_dir, tmp_path / "model"))
        (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20, "eos_token_id": 1}')
        worker = await start_worker(says("fox"))
        router = await start_router(worker, model=str(model), served_model_name="small-model")
        await router.http.post("/v1/chat/completions", json=CHAT | {"temperature": 0})
        await router.http.post("/v1/completions", json=TEXT)
        sampled = [(submit.sampling.temperature, submit.sampling.top_k) for submit in worker.submits]
        assert sampled == [(0, 20), (0.5, 20)]

    async def test_edges(self, start_router: StartRouter, start_worker: StartWorker, says: Says) -> None:
        submit = await self._submitted(
            start_router, start_worker, says, top_p=0, top_k=-1, seed=-1, ignore_eos=True, max_tokens=3
        )
        assert 0 < submit.sampling.top_p < 1e-5
        assert submit.sampling.top_k == 0
        assert submit.sampling.seed == (1 << 63) - 1
        assert list(submit.sampling.stop_token_ids) == []

    async def test_stop_tokens_come_before_the_models_own(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"))
        router = await start_router(worker)
        for fields in ({}, {"stop_token_ids": [7, 8]}, {"stop_token_ids": [7], "ignore_eos": True}):
            await router.http.post("/v1/chat/completions", json=CHAT | fields | {"max_tokens": 1})
        own, more, only = (list(submit.sampling.stop_token_ids) for submit in worker.submits)
        assert own
        assert (more, only) == ([7, 8, *own], [7])
        beyond = await router.http.post("/v1/chat/completions", json=CHAT | {"stop_token_ids": [1 << 30]})
        assert _error(beyond)["param"] == "stop_token_ids"

    async def test_seeds_differ_unless_given(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"))
        router = await start_router(worker)
        for _ in range(2):
            await router.http.post("/v1/chat/completions", json=CHAT)
        assert worker.submits[0].sampling.seed != worker.submits[1].sampling.seed


class TestHeaders:
    async def test_the_request_id_is_the_clients_or_a_new_one(self, router: Router) -> None:
        given = await router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        made = {(await router.http.post("/v1/chat/completions", json=CHAT)).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        for unusable in ("x" * 200, "a b", ""):
            answer = await router.http.get("/v1/models", headers={"x-request-id": unusable})
            assert answer.headers["x-request-id"].startswith("req_")
        assert (await router.http.get("/nowhere", headers={"x-request-id": "e"})).headers["x-request-id"] == "e"

    async def test_the_workers_see_the_request_id(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"))
        router = await start_router(worker)
        await router.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
        assert worker.submits[0].trace_id == "mine-1"

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_route_is_in_the_headers(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, stream: bool
    ) -> None:
        local = await start_router(await start_worker(says("fox"), worker_id="combined-7"))
        headers = (await local.http.post("/v1/chat/completions", json=CHAT | {"stream": stream})).headers
        assert (headers["x-cpd-route"], headers["x-cpd-decode-worker"]) == ("local", "combined-7")
        assert "x-cpd-prefill-worker" not in headers

    async def test_a_remote_route_names_both_workers(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        combined = await start_worker(says("fox", prefill_worker="prefill-3"))
        prefill = await start_worker(worker_id="prefill-3", kind="prefill")
        router = await start_router(combined, prefill, long_prefill_tokens=4)
        headers = (await router.http.post("/v1/chat/completions", json=CHAT)).headers
        assert headers["x-cpd-route"] == "remote"
        assert headers["x-cpd-prefill-worker"] == "prefill-3"
        candidates = combined.submits[0].prefill_candidates
        assert [(one.worker_id, one.address) for one in candidates] == [("prefill-3", prefill.address)]
        assert combined.submits[0].long_prefill_tokens == 4


class TestErrors:
    async def test_an_unknown_model(self, router: Router) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            response = await router.http.post(path, json=body | {"model": "gpt-9"})
            assert response.status_code == 404
            assert _error(response)["code"] == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await router.client.models.retrieve("gpt-9")

    async def test_unknown_routes_and_methods(self, router: Router) -> None:
        unknown = await router.http.get("/v1/nothing")
        assert (unknown.status_code, _error(unknown)["code"]) == (404, "not_found")
        wrong = await router.http.get("/v1/chat/completions")
        assert (wrong.status_code, _error(wrong)["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"

    async def test_only_the_start_of_a_text_far_longer_than_the_context_is_tokenised(
        self, router: Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoded: list[str] = []
        encode = PromptTokenizer._encode

        async def record(
            self: PromptTokenizer, texts: Sequence[str], owner: bytes, *, special_tokens: bool
        ) -> list[bytes]:
            encoded.extend(texts)
            return await encode(self, texts, owner, special_tokens=special_tokens)

        monkeypatch.setattr(PromptTokenizer, "_encode", record)
        text = "the quick brown fox " * 50_000
        for path, body, param in (
            ("/v1/completions", TEXT | {"prompt": ["fox", text]}, "prompt"),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]}, "messages"),
        ):
            response = await router.http.post(path, json=body)
            assert response.status_code == 400
            error = _error(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "512 tokens" in error["message"]
        assert 0 < sum(map(len, encoded)) < len(text) // 10

    async def test_more_than_the_context(self, router: Router, tokenizer: Tokenizer) -> None:
        prompt = len(tokenizer.encode(TEXT["prompt"]).ids)
        for path, body, param in (
            ("/v1/completions", TEXT | {"max_tokens": 512 - prompt + 1}, "prompt"),
            ("/v1/completions", TEXT | {"prompt": [5] * 512}, "prompt"),
            ("/v1/chat/completions", CHAT | {"max_tokens": 512}, "messages"),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "fox " * 600}]}, "messages"),
        ):
            response = await router.http.post(path, json=body)
            assert response.status_code == 400
            error = _error(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "maximum context length is 512 tokens" in error["message"]
        fits = await router.http.post("/v1/completions", json=TEXT | {"max_tokens": 512 - prompt})
        assert fits.status_code == 200

    async def test_tokens_that_the_model_does_not_have(self, router: Router) -> None:
        response = await router.http.post("/v1/completions", json=TEXT | {"prompt": [5, 512]})
        assert (response.status_code, _error(response)["param"]) == (400, "prompt")
        response = await router.http.post("/v1/completions", json=TEXT | {"logit_bias": {"512": 1}})
        assert (response.status_code, _error(response)["param"]) == (400, "logit_bias")

    async def test_an_empty_prompt(self, router: Router) -> None:
        response = await router.http.post("/v1/completions", json=TEXT | {"prompt": ""})
        assert (response.status_code, _error(response)["param"]) == (400, "prompt")

    async def test_a_body_that_is_too_large(self, start_router: StartRouter) -> None:
        router = await start_router(max_body=1_000)

        async def chunked() -> Any:
            for _ in range(20):
                yield b" " * 100

        for content in (b" " * 1_001, chunked()):
            response = await router.http.post("/v1/completions", content=content, headers=JSON)
            assert (response.status_code, _error(response)["code"]) == (413, "request_too_large")

    @pytest.mark.parametrize("sent", ["text/plain", "text/plain; application/json", "application/jsonl", "", None])
    async def test_a_body_of_another_media_type(self, start_router: StartRouter, sent: str | None) -> None:
        """Those that a web page may send to another site without asking, and others."""
        router = await start_router()
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            headers = {} if sent is None else {"content-type": sent}
            response = await router.http.post(path, content=json.dumps(body), headers=headers)
            error = _error(response)
            assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
            assert "'Content-Type: application/json'" in error["message"]
            assert f"has '{sent}'" in error["message"] if sent else "has none" in error["message"]

    @pytest.mark.parametrize("sent", ["application/json; charset=utf-8", "Application/JSON;charset=UTF-8"])
    async def test_parameters_and_case_of_the_media_type_do_not_matter(self, router: Router, sent: str) -> None:
        headers = {"content-type": sent, "content-encoding": "Identity"}
        response = await router.http.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
        assert response.status_code == 200, response.text

    @pytest.mark.parametrize("sent", ["gzip", "br", "identity, gzip"])
    async def test_a_compressed_body(self, router: Router, sent: str) -> None:
        headers = JSON | {"content-encoding": sent}
        response = await router.http.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
        error = _error(response)
        assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
        assert error["message"] == f"The Content-Encoding '{sent}' is not supported; send the body uncompressed."

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("host", ("localhost", "evil.example")),
            ("authorization", ("Bearer none", "Bearer other")),
            ("content-type", ("application/json", "text/plain")),
            ("content-encoding", ("gzip", "identity")),
            ("x-request-timeout-ms", ("1", "60000")),
        ],
    )
    async def test_a_header_with_two_values(self, router: Router, name: str, values: tuple[str, str]) -> None:
        """A proxy might have looked at the other one."""
        body = json.dumps(TEXT)
        for sent in (values, values[::-1]):
            once = {"host": "localhost", "content-type": "application/json"}
            headers = [
                *((key, value) for key, value in once.items() if key != name),
                *((name, value) for value in sent),
            ]
            head = "".join(f"{key}: {value}\r\n" for key, value in [*headers, ("content-length", len(body))])
            reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
            with contextlib.closing(writer):
                writer.write(f"POST /v1/completions HTTP/1.0\r\n{head}\r\n{body}".encode())
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert (error["code"], f"'{name}'" in error["message"]) == ("invalid_http", True)

    async def test_headers_that_may_be_repeated(self, router: Router) -> None:
        headers = [("x-forwarded-for", "10.0.0.1"), ("x-forwarded-for", "10.0.0.2"), ("accept", "a"), ("accept", "b")]
        assert (await router.http.post("/v1/completions", json=TEXT, headers=headers)).status_code == 200

    @pytest.mark.parametrize("path", ["/livez/", "/v1/chat/completions/", "/cluster/", "/static-offline-docs"])
    async def test_no_route_redirects(self, router: Router, path: str) -> None:
        response = await router.http.get(path)
        assert (response.status_code, _error(response)["code"]) == (404, "not_found")

    async def test_a_transfer_encoding_other_than_chunked(self, router: Router) -> None:
        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        with contextlib.closing(writer):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            error = json.loads(await reader.readuntil(b"}}"))["error"]
        assert error["code"] == "invalid_http"
        assert error["message"] == "The Transfer-Encoding 'gzip, chunked' is not supported; use 'chunked' or none."

    async def test_the_connection_stays_usable_after_a_refused_body(self, router: Router) -> None:
        """The rest of a body that nobody reads is not taken for the next request."""
        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        with contextlib.closing(writer):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
            writer.write(head + b" " * 1_000_000 + b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 415 ")
            assert b"application/json" in await reader.readuntil(b"}}")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("depth", [256, 1_000, 1_024, 10_000, 100_000])
    @pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
    async def test_a_body_that_is_nested_too_deep(self, router: Router, depth: int, opening: str, closing: str) -> None:
        for end in ("1", "null", r'"\u0000"'):
            value = opening * depth + end + closing * depth
            for path, body in (
                ("chat/completions", CHAT | {"metadata": "VALUE"}),
                ("chat/completions", CHAT | {"tools": "VALUE"}),
                ("chat/completions", CHAT | {"unknown": "VALUE"}),
                ("chat/completions", CHAT | {"messages": "VALUE"}),
                ("chat/completions", CHAT | {"messages": [{"role": "user", "content": "VALUE"}]}),
                ("chat/completions", CHAT | {"chat_template_kwargs": "VALUE"}),
                ("completions", TEXT | {"prompt": "VALUE"}),
            ):
                content = json.dumps(body).replace('"VALUE"', value)
                response = await router.http.post(f"/v1/{path}", content=content, headers=JSON)
                assert response.status_code == 400, response.text
                error = _error(response)
                assert error["code"] == "invalid_json"
                assert error["message"] == "The body is nested more than 256 levels deep."

    async def test_a_body_can_be_nested_up_to_the_limit(self, router: Router) -> None:
        value: Any = {"a": None, "b": "\0"}
        for level in range(253):
            value = [value] if level % 2 else {"a": value}
        response = await router.http.post("/v1/chat/completions", json=CHAT | {"metadata": [value]})
        assert response.status_code == 200, response.text
        for path, body in (
            ("chat/completions", CHAT | {"messages": [value]}),
            ("chat/completions", CHAT | {"chat_template_kwargs": {"a": value}}),
            ("completions", TEXT | {"prompt": [value]}),
        ):
            response = await router.http.post(f"/v1/{path}", json=body)
            assert (response.status_code, _error(response)["code"]) == (400, "invalid_value"), response.text

    async def test_a_body_that_does_not_arrive(self, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("router.api.body.BODY_S", 0.1)

        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        with contextlib.closing(writer):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: 9\r\n\r\n{")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert b"request_timeout" in await reader.readuntil(b"}}")

    async def test_no_worker(self, start_router: StartRouter) -> None:
        router = await start_router()
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT | {"stream": True})):
            response = await router.http.post(path, json=body)
            assert (response.status_code, _error(response)["code"]) == (503, "service_unavailable")
            assert int(response.headers["retry-after"]) >= 1

    async def test_a_bug_is_an_internal_error(self, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("router.operations.overview.cluster_status", lambda service: 1 / 0)
        response = await router.http.get("/cluster")
        assert (response.status_code, _error(response)["code"]) == (500, "internal_error")
        assert "x-request-id" in response.headers

    async def test_a_bug_within_a_stream_is_its_last_event(
        self, router: Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("router.api.openai.CompletionFormat.final", lambda *_: 1 / 0)
        response = await router.http.post("/v1/completions", json=TEXT | {"stream": True})
        *_, last, rest = response.text.split("\n\n")
        assert (response.status_code, rest) == (200, "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert "[DONE]" not in response.text


class TestKeys:
    ROUTES = (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/small-model"),
        ("GET", "/metrics"),
        ("GET", "/cluster"),
        ("GET", "/usage"),
        ("GET", "/nowhere"),
        ("DELETE", "/v1/models"),
    )

    @pytest.mark.parametrize("sent", [None, "Bearer wrong", "Basic one", "Bearer"])
    async def test_every_route_but_health_needs_one(self, start_router: StartRouter, sent: str | None) -> None:
        router = await start_router(api_key=["one", "two"])
        async with httpx.AsyncClient(
            base_url=router.url, headers={"authorization": sent} if sent else {}, timeout=30
        ) as client:
            for method, path in self.ROUTES:
                response = await client.request(method, path)
                assert (response.status_code, _error(response)["code"]) == (401, "invalid_api_key"), path
                assert response.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/livez")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503

    async def test_tenants_have_block_hashes_and_names_of_their_own(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says
    ) -> None:
        worker = await start_worker(says("fox"))
        router = await start_router(worker, api_key=["one", "two"])
        body = TEXT | {"prompt": [5] * 40}
        for key in ("one", "two", "one"):
            response = await router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
        first, second, third = worker.submits
        assert first.block_hashes != second.block_hashes
        assert len(first.block_hashes) == 2 * 16
        assert (first.hash_root, first.block_hashes, first.tenant) == (
            third.hash_root,
            third.block_hashes,
            third.tenant,
        )
        assert first.tenant != second.tenant
        assert "one" not in first.tenant


class TestHealthAndModels:
    async def test_ready_when_a_combined_worker_has_sent_its_snapshot(
        self, start_router: StartRouter, start_worker: StartWorker
    ) -> None:
        router = await start_router()
        assert (await router.http.get("/livez")).json() == {"status": "ok"}
        assert (await router.http.get("/readyz")).status_code == 503
        await router.knows(await start_worker(worker_id="prefill-0", kind="prefill"))
        assert (await router.http.get("/readyz")).status_code == 503
        worker = await start_worker()
        worker.snapshot_may_go.clear()
        await eventually(lambda: _said_hello(worker.hellos))
        assert (await router.http.get("/readyz")).status_code == 503
        worker.snapshot_may_go.set()
        await router.knows(worker)
        assert (await router.http.get("/readyz")).json() == {"status": "ok"}

    async def test_probes_that_fail_are_not_counted_as_errors(self, start_router: StartRouter) -> None:
        router = await start_router()
        for path in ("/readyz", "/health", "/ping"):
            response = await router.http.get(path)
            assert (response.status_code, _error(response)["code"]) == (503, "service_unavailable")
            assert "retry-after" in response.headers
        counted = 'cpd_request_errors_total{code="service_unavailable"} 0.0'
        assert counted in (await router.http.get("/metrics")).text

    async def test_the_model_is_listed(self, router: Router) -> None:
        models = [model async for model in router.client.models.list()]
        assert [model.id for model in models] == [MODEL]
        assert (await router.client.models.retrieve(MODEL)).object == "model"

    async def test_a_name_may_have_a_slash(self, start_router: StartRouter) -> None:
        router = await start_router(served_model_name="org/model")
        assert (await router.client.models.retrieve("org/model")).id == "org/model"

    async def test_metrics_count_what_happened(self, router: Router) -> None:
        await router.http.post("/v1/chat/completions", json=CHAT)
        await router.http.post("/v1/chat/completions", json=CHAT | {"n": 0})
        text = (await router.http.get("/metrics")).text
        for line in (
            'cpd_requests_total{outcome="completed",route="local"} 1.0',
            'cpd_request_errors_total{code="invalid_value"} 1.0',
            'cpd_ttft_seconds_count{route="local"} 1.0',
            "cpd_cached_tokens_total 16.0",
            'cpd_worker_live{role="combined",router="router-a",worker="combined-0"} 1.0',
            'cpd_worker_pages{role="combined",router="router-a",state="free",worker="combined-0"} 100.0',
        ):
            assert line in text.splitlines()


async def _said_hello(hellos: list[str]) -> bool:
    return bool(hellos)


async def test_a_very_long_prompt_is_hashed_without_blocking_other_requests(
    start_router: StartRouter, start_worker: StartWorker, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[int] = []

    def counted(parent: bytes, tokens: bytes) -> list[bytes]:
        longest.append(len(tokens) // TOKEN_BYTES)
        return extend_hashes(parent, tokens)

    monkeypatch.setattr("router.api.completions.extend_hashes", counted)
    worker = await start_worker(says("fox"), hello={"max_model_len": 200_000})
    router = await start_router(worker)
    prompt = [number % 400 for number in range(131_080)]
    response = await router.http.post("/v1/completions", json=TEXT | {"prompt": prompt})
    assert response.status_code == 200
    (submit,) = worker.submits
    assert submit.block_hashes == b"".join(extend_hashes(submit.hash_root, prompt))
    assert max(longest) <= 8_192


async def test_logs_never_show_prompts_or_answers(
    start_router: StartRouter, start_worker: StartWorker, says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    router = await start_router(await start_worker(says("the lazy fox")))
    prompt = "quick brown dog"
    for change in ({}, {"stream": True}, {"temperature": "hot"}, {"n": 99}, {"messages": [{"role": prompt}]}):
        body = CHAT | {"messages": [{"role": "user", "content": prompt}]} | change
        await router.http.post("/v1/chat/completions", json=body)
    await router.http.post("/v1/completions", content=f'{{"prompt": "{prompt}"', headers=JSON)
    assert caplog.records
    for text in (prompt, "lazy fox"):
        assert text not in caplog.text
