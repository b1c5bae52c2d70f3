"""Limits on reasoning: what a router tells workers, and which requests it refuses."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from cpd.rpc import cpd_pb2 as pb
from tests.router.api.tool_models import MARKERS, MODEL, QUESTION, make_tool_model
from tests.router.conftest import Router, StartRouter, StartWorker
from tests.router.fake_worker import Answer, FakeWorker, outputs

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}

Start = Callable[..., Awaitable[tuple[Router, FakeWorker, dict[str, int]]]]


@pytest.fixture
def start(start_router: StartRouter, start_worker: StartWorker, model_dir: Path, tmp_path: Path) -> Start:
    """`await start("template")`: a router, its worker, and the ids of the markers."""

    async def make(
        template: str, *, limits: bool = True, markers: tuple[str, ...] = MARKERS, **settings: Any
    ) -> tuple[Router, FakeWorker, dict[str, int]]:
        directory = tmp_path / MODEL
        tokenizer, end = make_tool_model(model_dir, directory, template, markers)

        async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
            for output in outputs(submit, [[end]]):
                yield output

        hello = {"max_model_len": 4096, "num_pages": 1000, "grammars": limits}
        worker: FakeWorker = await start_worker(script, hello=hello)
        ids = {marker: tokenizer.get_vocab()[marker] for marker in markers}
        return await start_router(worker, model=str(directory), **settings), worker, ids

    return make


async def ask(router: Router, **fields: Any) -> None:
    extra = {"thinking_token_budget": 9} | fields
    await router.client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=extra)


async def test_a_worker_gets_the_budget_and_the_tokens_around_the_reasoning(start: Start) -> None:
    router, worker, ids = await start("hermes-tools")
    await ask(router)
    begin, end = ids["<think>"], ids["</think>"]
    assert worker.submits[-1].sampling.thinking_budget == pb.ThinkingBudget(tokens=9, end_token=end, start_token=begin)
    await ask(router, **THINKING)  # the prompt begins the reasoning
    assert worker.submits[-1].sampling.thinking_budget == pb.ThinkingBudget(tokens=9, end_token=end)
    await ask(router, **THINKING, guided_choice=["yes"])
    assert worker.submits[-1].sampling.thinking_budget.end_token == end
    await ask(router, thinking_token_budget=None)
    assert not worker.submits[-1].sampling.HasField("thinking_budget")


async def test_a_model_that_does_not_reason_has_no_use_for_a_budget(start: Start) -> None:
    router, worker, _ = await start("chatml", limits=False)
    await ask(router)
    assert not worker.submits[-1].sampling.HasField("thinking_budget")


async def test_a_prompt_that_ended_the_reasoning_has_no_use_for_a_budget(start: Start) -> None:
    router, worker, _ = await start("{{ '<think>\n\n</think>\n\n' }}")
    await ask(router)
    assert not worker.submits[-1].sampling.HasField("thinking_budget")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"markers": ()}, "no tokens of its own"),
        ({"limits": False}, "no worker"),
        ({"reasoning_parser": "none"}, "not supported"),
    ],
)
async def test_a_budget_that_can_not_be_kept_is_refused(start: Start, fields: dict[str, Any], why: str) -> None:
    router, _, _ = await start("hermes-tools", **fields)
    with pytest.raises(openai.BadRequestError, match=why) as refusal:
        await ask(router)
    assert (refusal.value.param, refusal.value.code) == ("thinking_token_budget", "unsupported_parameter")
