"""A router on a real socket, in this process, in front of scripted workers."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cpd.common.lifecycle import Lifecycle
from cpd.common.settings import RouterSettings
from cpd.rpc import cpd_pb2 as pb
from router.dispatch import workers
from router.listener import listen
from router.operations import peer_routers
from router.server import serve
from tests.router.fake_worker import Answer, FakeWorker, Script, outputs
from tests.secret import secret_file
from tests.waiting import DEADLINE_S

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_clusters = itertools.count()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for the router: a byte-level tokenizer, a chat template, EOS."""
    text = "the quick brown fox jumps over the lazy dog, naïvely: 你好 🙂"
    return make_model(tmp_path_factory.mktemp("model") / "small-model", text)


def make_model(directory: Path, text: str, template: str = TEMPLATE) -> Path:
    """Writes a checkpoint for a router, whose tokenizer has learned `text`; returns its directory."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in ("<|start|>", "<|end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|end|>")}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of `model_dir`."""
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises time limits: scripted workers send nothing by themselves, and the machine may be busy."""
    monkeypatch.setattr(workers, "SILENT_S", 60.0)
    monkeypatch.setattr(peer_routers, "ANSWER_S", 10.0)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of the shared Redis."""
    async with Redis.from_url(redis_url) as client:
        yield client


@dataclass(frozen=True, slots=True)
class Router:
    """A running router and clients of it."""

    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    async def cluster(self) -> dict[str, Any]:
        """`GET /cluster`."""
        answer: dict[str, Any] = (await self.http.get("/cluster")).raise_for_status().json()
        return answer

    async def worker(self, worker_id: str) -> dict[str, Any] | None:
        """One worker's part of `GET /cluster`."""
        return next((worker for worker in (await self.cluster())["workers"] if worker["id"] == worker_id), None)

    async def own_lease(self) -> dict[str, Any]:
        """The only router of `GET /cluster`, once its lease is known."""
        found: list[dict[str, Any]] = []

        async def listed() -> bool:
            found[:] = (await self.cluster())["routers"]
            return bool(found)

        await eventually(listed)
        (own,) = found
        return own

    async def knows(self, *workers: FakeWorker) -> None:
        """Waits until these workers are live."""
        for worker in workers:
            await eventually(lambda worker=worker: self._ready(worker.id))  # type: ignore[misc]

    async def _ready(self, worker_id: str) -> bool:
        worker = await self.worker(worker_id)
        return worker is not None and worker["state"] == "ready"


StartRouter = Callable[..., Awaitable[Router]]
StartWorker = Callable[..., Awaitable[FakeWorker]]


@pytest.fixture
def cluster() -> str:
    """A cluster name for this test alone."""
    return f"router-test-{next(_clusters)}"


@pytest.fixture
async def start_router(redis_url: str, model_dir: Path, cluster: str) -> AsyncIterator[StartRouter]:
    """`await start_router(*workers, **settings)`: a router that knows the workers."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*workers: FakeWorker, name: str = "router-a", port: int = 0, **settings: Any) -> Router:
            given: dict[str, Any] = {
                "model": str(model_dir),
                "cluster": cluster,
                "redis_url": redis_url,
                "secret_file": secret_file(),
            }
            listener = stack.enter_context(listen(settings.get("host", "127.0.0.1"), port))
            lifecycle = Lifecycle(30.0)
            serving = asyncio.create_task(serve(RouterSettings(**(given | settings)), name, listener, lifecycle))

            async def end() -> None:
                lifecycle.stop("the test ends")
                await serving

            stack.push_async_callback(end)
            scheme = "https" if "tls_cert" in settings else "http"
            url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
            key = settings.get("api_key", ["none"])[0]
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30, verify=False)
            )
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)
            await stack.enter_async_context(client)
            router = Router(url, http, client)
            await eventually(lambda: _answers(http))
            await router.knows(*workers)
            return router

        yield start


@pytest.fixture
async def start_worker(redis: Redis, cluster: str) -> AsyncIterator[StartWorker]:
    """`await start_worker(script, **arguments)`: a scripted worker in the test's cluster."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script | None = None, **arguments: Any) -> FakeWorker:
            return await stack.enter_async_context(FakeWorker(redis, script, cluster=cluster, **arguments))

        yield start


Says = Callable[..., Script]


@pytest.fixture(scope="session")
def says(tokenizer: Tokenizer) -> Says:
    """`says("text", ...)` makes a script that answers choice i with the i-th text, one token per step, then EOS."""

    def make(*texts: str, prefill_worker: str = "", after: Callable[[int], Awaitable[None]] | None = None) -> Script:
        end = tokenizer.encode("<|end|>").ids[0]
        replies = [[*tokenizer.encode(text).ids, end] for text in texts]

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            for count, output in enumerate(outputs(submit, replies, prefill_worker=prefill_worker)):
                if after is not None:
                    await after(count)
                yield output

        return script

    return make


async def eventually(condition: Callable[[], Awaitable[bool]], deadline_s: float = DEADLINE_S) -> None:
    """Waits until the condition holds, with a deadline."""
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110 - nothing tells when it changes
            await asyncio.sleep(0.01)


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/livez")).status_code == 200
    except httpx.TransportError:
        return False
