"""A router of several models, in front of scripted workers of each."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import Tokenizer

from cpd.common.errors import ConfigError
from cpd.common.lifecycle import Lifecycle
from cpd.common.model_digest import model_digest
from cpd.common.settings import RouterSettings
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from router.listener import listen
from router.server import serve
from tests.router.conftest import TEMPLATE, Router, StartRouter, StartWorker, eventually, make_model
from tests.router.fake_worker import Answer, FakeWorker, Script, outputs
from tests.secret import SECRET, secret_file

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the brown fox"}]
FIRST, SECOND = 0, 1


@dataclass(frozen=True)
class Small:
    """A checkpoint for routers, served under `name` and, the second one, under `more`."""

    name: str
    directory: Path
    aliases: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    @property
    def entry(self) -> dict[str, object]:
        return {"name": self.name, "model": str(self.directory), "aliases": list(self.aliases)}

    @property
    def hello(self) -> dict[str, object]:
        return {"fingerprint": self.name.encode(), "model_digest": model_digest(self.directory)}

    def says(self, text: str) -> Script:
        replies = [self.tokenizer.encode(text).ids + self.tokenizer.encode("<|end|>").ids]

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            for output in outputs(submit, replies):
                yield output

        return script


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Small]:
    other = tmp_path_factory.mktemp("models") / "other"
    make_model(other, "ein anderer Text, aus dem andere Wörter werden", TEMPLATE.replace("assistant", "Antwort"))
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    return [Small("english", model_dir), Small("deutsch", other, ("org/deutsch", "de"))]


@pytest.fixture
async def workers(models: list[Small], start_worker: StartWorker) -> list[FakeWorker]:
    """A worker of each model, which says hello in its tokens."""
    return [
        await start_worker(
            model.says(f"hello from {model.name}"),
            worker_id=f"{model.name}-combined-0",
            model=model.name,
            hello={**model.hello, "max_model_len": 500 + number},
        )
        for number, model in enumerate(models)
    ]


@pytest.fixture
async def router(models: list[Small], workers: list[FakeWorker], start_router: StartRouter) -> Router:
    return await start_router(*workers, model="", models=[model.entry for model in models])


async def ask(router: Router, model: str) -> str:
    answer = await router.client.chat.completions.create(model=model, messages=MESSAGES)
    return answer.choices[0].message.content or ""


async def test_each_model_answers_with_its_own_tokenizer_template_and_workers(
    router: Router, models: list[Small], workers: list[FakeWorker]
) -> None:
    for model, worker in zip(models, workers, strict=True):
        assert await ask(router, model.name) == f"hello from {model.name}"
        [submit] = worker.submits
        text = model.tokenizer.decode([*memoryview(submit.tokens).cast("i")], skip_special_tokens=False)
        assert text.endswith("<|start|>assistant\n" if model.name == "english" else "<|start|>Antwort\n")
    streamed = await router.client.chat.completions.create(model="deutsch", messages=MESSAGES, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in streamed]
    assert "".join(parts) == "hello from deutsch"


async def test_an_alias_is_a_name_of_the_same_model(router: Router, workers: list[FakeWorker]) -> None:
    assert await ask(router, "org/deutsch") == await ask(router, "de") == "hello from deutsch"
    assert [len(worker.submits) for worker in workers] == [0, 2]
    assert (await router.client.models.retrieve("org/deutsch")).id == "deutsch"


async def test_an_unknown_model_is_refused_with_the_names_that_there_are(router: Router) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt' does not exist. This server has 'english' and 'deutsch'"):
        await ask(router, "gpt")


async def test_the_models_are_listed_with_their_context(router: Router) -> None:
    listed = (await router.client.models.list()).data
    assert [(one.id, getattr(one, "max_model_len", None)) for one in listed] == [("english", 500), ("deutsch", 501)]


async def test_each_model_has_its_own_sampling_defaults(router: Router, workers: list[FakeWorker]) -> None:
    await ask(router, "english")
    await ask(router, "de")
    temperatures = [worker.submits[0].sampling.temperature for worker in workers]
    assert temperatures == [1.0, 0.25]


async def test_tokens_are_those_of_the_model_that_is_named(router: Router, models: list[Small]) -> None:
    for model in models:
        answer = await router.http.post("/tokenize", json={"model": model.name, "prompt": "the anderer"})
        assert answer.json()["tokens"] == model.tokenizer.encode("the anderer").ids
    refused = await router.http.post("/tokenize", json={"prompt": "the"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "missing_required_parameter")


async def test_the_clusters_state_says_which_worker_serves_which_model(router: Router) -> None:
    state = await router.cluster()
    assert [(one["id"], one["model"]) for one in state["workers"]] == [
        ("deutsch-combined-0", "deutsch"),
        ("english-combined-0", "english"),
    ]
    described = [(one["name"], one["aliases"], one["ready"], one["max_model_len"]) for one in state["models"]]
    assert described == [("english", [], True, 500), ("deutsch", ["org/deutsch", "de"], True, 501)]
    assert (state["model"], state["max_model_len"]) == ("english", 500)


async def test_metrics_have_the_models_name_as_a_label(router: Router) -> None:
    await ask(router, "de")
    text = (await router.http.get("/metrics")).text
    assert re.search(r'^cpd_requests_total\{model="deutsch",outcome="completed",route="local"\} 1\.0$', text, re.M)
    assert re.search(r'^cpd_worker_live\{model="english",.*worker="english-combined-0"\} 1\.0$', text, re.M)
    assert text.count("# TYPE cpd_itl_seconds histogram") == 1
    assert text.count("cpd_itl_seconds_count{") == 2


async def test_placements_of_all_models_are_found(router: Router) -> None:
    for model in ("english", "deutsch"):
        await router.client.chat.completions.create(
            model=model, messages=MESSAGES, extra_headers={"x-request-id": f"to-{model}"}
        )
        placements = (await router.http.get(f"/requests/to-{model}")).json()["placements"]
        assert [one["predicted"]["decode"] for one in placements] == [f"{model}-combined-0"]


async def test_the_loss_of_one_models_worker_does_not_touch_the_other(
    router: Router, workers: list[FakeWorker]
) -> None:
    await workers[SECOND].kill()

    async def lost() -> bool:
        worker = await router.worker("deutsch-combined-0")
        return worker is None or worker["state"] != "ready"

    await eventually(lost)
    with pytest.raises(openai.InternalServerError, match="No worker is ready"):
        await ask(router, "deutsch")
    assert await ask(router, "english") == "hello from english"
    assert (await router.http.get("/readyz")).status_code == 200


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("", "its lease names no model"),
        ("gpt", "its lease names the model 'gpt'"),
        ("deutsch", "its config.json, tokenizer or chat template"),
    ],
)
async def test_a_worker_that_belongs_to_no_model_is_refused_and_harms_nobody(
    models: list[Small], start_worker: StartWorker, start_router: StartRouter, named: str, reason: str
) -> None:
    english, deutsch = models
    await start_worker(worker_id="stray", model=named, hello=english.hello)
    router = await start_router(model="", models=[english.entry, deutsch.entry])

    async def refused() -> bool:
        worker = await router.worker("stray")
        return worker is not None and worker["state"] == "refused" and worker["reason"].startswith(reason)

    await eventually(refused)
    for model in models:
        worker = await start_worker(
            model.says("hi"), worker_id=f"{model.name}-combined-0", model=model.name, hello=model.hello
        )
        await router.knows(worker)
        assert await ask(router, model.name) == "hi"


async def test_two_models_with_equal_text_files_keep_apart(
    models: list[Small], start_worker: StartWorker, start_router: StartRouter
) -> None:
    tuned = [Small("base", models[0].directory), Small("tuned", models[0].directory)]
    workers = [
        await start_worker(
            model.says(f"I am {model.name}"), worker_id=f"{model.name}-combined-0", model=model.name, hello=model.hello
        )
        for model in tuned
    ]
    router = await start_router(*workers, model="", models=[model.entry for model in tuned])
    for model in tuned:
        assert await ask(router, model.name) == f"I am {model.name}"


async def test_a_prompt_goes_to_prefill_workers_of_its_own_model_only(
    models: list[Small], start_worker: StartWorker, start_router: StartRouter
) -> None:
    workers = [
        await start_worker(
            model.says("hi"),
            worker_id=f"{model.name}-{kind}-0",
            model=model.name,
            hello=model.hello,
            kind=kind,
        )
        for model in models
        for kind in ("combined", "prefill")
    ]
    router = await start_router(
        *workers,
        model="",
        models=[model.entry for model in models],
        policy={"name": "round-robin"},
        long_prefill_tokens=1,
    )
    for model, combined in zip(models, workers[::2], strict=True):
        assert await ask(router, model.name) == "hi"
        [submit] = combined.submits
        assert [one.worker_id for one in submit.prefill_candidates] == [f"{model.name}-prefill-0"]


class TestKeys:
    @pytest.fixture
    def key_file(self, tmp_path: Path) -> Path:
        file = tmp_path / "keys.yaml"
        file.write_text("[{key: all}, {key: german, models: [de]}]")
        return file

    async def test_a_key_may_use_only_its_models(
        self, models: list[Small], workers: list[FakeWorker], start_router: StartRouter, key_file: Path
    ) -> None:
        router = await start_router(
            *workers,
            model="",
            models=[model.entry for model in models],
            api_key=["operator"],
            api_key_file=key_file,
        )
        client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="german", max_retries=0)
        async with client:
            answer = await client.chat.completions.create(model="deutsch", messages=MESSAGES)
            assert answer.choices[0].message.content == "hello from deutsch"
            with pytest.raises(openai.NotFoundError, match=r"'english' does not exist. This server has 'deutsch'"):
                await client.chat.completions.create(model="english", messages=MESSAGES)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("english")
            assert [one.id for one in (await client.models.list()).data] == ["deutsch"]
        headers = {"authorization": "Bearer german"}
        tokens = await router.http.post("/tokenize", json={"prompt": "ein"}, headers=headers)  # only one can be meant
        assert tokens.json()["tokens"] == models[SECOND].tokenizer.encode("ein").ids
        assert await ask(router, "english") == "hello from english"

    async def test_a_key_for_a_model_that_there_is_not_is_refused(self, models: list[Small], key_file: Path) -> None:
        settings = _settings(models=[models[FIRST].entry], api_key_file=key_file)
        with pytest.raises(ConfigError, match="has a key for the model 'de', and there is none of that name"):
            await _serve(settings)


async def test_one_model_and_several_together_are_refused(models: list[Small]) -> None:
    settings = _settings(model=str(models[FIRST].directory), models=[model.entry for model in models])
    with pytest.raises(ConfigError, match="--model is for one model"):
        await _serve(settings)


async def test_the_planner_is_refused(router: Router) -> None:
    async def listed() -> bool:
        return bool((await router.cluster())["routers"])

    await eventually(listed)
    [described] = (await router.cluster())["routers"]
    headers = {"authorization": f"Bearer {ClusterSecret(SECRET).admin_key}"}
    answer = await router.http.get(f"http://{described['admin']}/load", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "several_models")


def _settings(**fields: object) -> RouterSettings:
    return RouterSettings.load({"redis_url": "redis://127.0.0.1:1", "secret_file": secret_file(), **fields})


async def _serve(settings: RouterSettings) -> None:
    with listen("127.0.0.1", 0) as listener:
        async with asyncio.timeout(10):
            await serve(settings, "router-a", listener, Lifecycle(1.0))
