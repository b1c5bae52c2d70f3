"""A router whose worker answers known text, for the tests of what outputs become."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.router.api.tool_models import MODEL, make_tool_model
from tests.router.conftest import Router, StartRouter, StartWorker
from tests.router.fake_worker import Answer, FakeWorker, outputs

ARGUMENTS = '{"city": "Zürich",  "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

Start = Callable[..., Awaitable[Router]]


@pytest.fixture
def start(start_router: StartRouter, start_worker: StartWorker, model_dir: Path, tmp_path: Path) -> Start:
    """`await start("template", "text", …)`: a router whose worker answers choice i with the i-th text, then EOS.

    All markers are special tokens of the model. With `fails`, the worker fails after three tokens,
    when that is set.
    """

    async def make(template: str, *texts: str, fails: asyncio.Event | None = None, **settings: Any) -> Router:
        directory = tmp_path / MODEL
        tokenizer, end = make_tool_model(model_dir, directory, template)
        replies = [[*tokenizer.encode(text).ids, end] for text in texts]

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            for count, output in enumerate(outputs(submit, replies)):
                if count == 3 and fails is not None:
                    await fails.wait()
                    yield pb.Refusal(kind=pb.Refusal.KIND_FAILED, message="out of luck")
                    return
                yield output

        hello = {"max_model_len": 4096, "num_pages": 1000, "grammars": True}
        worker: FakeWorker = await start_worker(script, hello=hello)
        return await start_router(worker, model=str(directory), **settings)

    return make
