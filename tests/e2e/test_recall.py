"""The bundled model recalls facts from its prompt on every route. A wrong page, position or mask changes its answer."""

from collections.abc import Iterator
from random import Random
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from models import tiny
from models.tiny.data.cases import Case, recall_case
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e

LONG = 256
CASES = 20
MIN_SHORT_RIGHT, MIN_LONG_RIGHT = 19, 18
"""Minimum number of right answers. The model gets at least 99 % of fresh cases right."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"model": str(tiny.CHECKPOINT), "served_model_name": tiny.NAME, "dtype": "auto"}
    with Cluster(**settings, kv_memory=256 << 20, long_prefill_tokens=LONG) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, case: Case) -> tuple[bool, str, int]:
    """Returns whether the answer is right, the route, and the number of cached tokens."""
    messages: Any = list(case.messages)
    response = client.chat.completions.with_raw_response.create(
        model=tiny.NAME,
        messages=messages,
        max_tokens=64,
        temperature=0,
    )
    answer = response.parse()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    [choice] = answer.choices
    is_right = (choice.message.content, choice.finish_reason) == (case.answer, "stop")
    return is_right, response.headers["x-cpd-route"], answer.usage.prompt_tokens_details.cached_tokens or 0


def cases(min_tokens: int, max_tokens: int) -> list[Case]:
    tokenizer = Tokenizer.from_file(str(tiny.CHECKPOINT / "tokenizer.json"))
    rng = Random(f"end to end {min_tokens}")
    return [
        recall_case(rng, min_tokens, max_tokens, lambda text: len(tokenizer.encode(text).ids)) for _ in range(CASES)
    ]


def test_facts_in_short_prompts_are_recalled(client: openai.OpenAI) -> None:
    answers = [ask(client, case) for case in cases(20, 99)]
    assert {route for _, route, _ in answers} == {"local"}
    assert sum(right for right, _, _ in answers) >= MIN_SHORT_RIGHT


def test_facts_in_long_prompts_are_recalled_after_remote_prefill_and_from_the_cache(client: openai.OpenAI) -> None:
    asked = cases(2000, 3960)
    first = [ask(client, case) for case in asked]
    assert {route for _, route, _ in first} == {"remote"}
    again = [ask(client, case) for case in asked]
    assert {route for _, route, _ in again} == {"local"}
    assert all(cached > 1900 for _, _, cached in again)
    for answers in (first, again):
        assert sum(right for right, _, _ in answers) >= MIN_LONG_RIGHT
