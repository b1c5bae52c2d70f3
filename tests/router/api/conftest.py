"""A router whose worker answers known text, for the tests of what outputs become."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cpd.rpc import cpd_pb2 as pb
from tests.router.conftest import Router, StartRouter, StartWorker
from tests.router.fake_worker import Answer, FakeWorker, outputs
from tests.router.text.test_template import TEMPLATES

MODEL = "tool-model"
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]")
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
        shutil.copytree(model_dir, directory, dirs_exist_ok=True)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens(list(MARKERS))
        tokenizer.save(str(directory / "tokenizer.json"))
        source = next((path.read_text() for path in TEMPLATES if path.stem == template), template)
        special = {"eos_token": "<|end|>", "bos_token": "<|start|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": source}))
        end = tokenizer.encode("<|end|>").ids[0]
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
