"""OpenAI's official client against a cluster that serves the bundled model."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from models import tiny
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.e2e

KEY = "sesame"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        model=str(tiny.CHECKPOINT), served_model_name=tiny.NAME, dtype="auto", long_prefill_tokens=64, api_key=[KEY]
    ) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("length", [3, 150])
def test_a_streamed_chat_equals_the_same_chat_unstreamed(client: openai.OpenAI, length: int) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "tell " * length}]
    whole = client.chat.completions.create(model=tiny.NAME, messages=messages, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=tiny.NAME,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_long_prompts_are_prefilled_remotely(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(model=tiny.NAME, prompt="copper " * 200, max_tokens=4)
    assert answer.headers["x-cpd-route"] == "remote"
    assert answer.headers["x-cpd-prefill-worker"] == "prefill-0"
    assert answer.headers["x-cpd-decode-worker"] == "combined-0"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("length", [3, 150])
def test_a_token_of_the_clients_choice_ends_the_answer(client: openai.OpenAI, length: int) -> None:
    def ask(**fields: object) -> tuple[str, list[int], str]:
        extra = {"return_token_ids": True, "ignore_eos": True, **fields}
        answer = client.completions.create(
            model=tiny.NAME, prompt="tell " * length, max_tokens=24, seed=5, extra_body=extra
        )
        choice = answer.choices[0].model_dump()
        return choice["text"], choice["token_ids"], choice["finish_reason"]

    text, ids, _ = ask()
    last = max(place for place, token_id in enumerate(ids) if token_id not in ids[:place])
    without, until_stop, finish = ask(stop_token_ids=[ids[last]])
    assert (until_stop, finish) == (ids[: last + 1], "stop")
    including, same, _ = ask(stop_token_ids=[ids[last]], include_stop_str_in_output=True)
    assert same == until_stop
    assert text.startswith(including)
    assert including.startswith(without)
    assert including != without


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [tiny.NAME]


def test_errors_have_the_types_of_the_official_client(client: openai.OpenAI, cluster: Cluster) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model=tiny.NAME, prompt="a", max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_health_checks_need_no_key_and_everything_else_does(cluster: Cluster) -> None:
    for path, status in (("/livez", 200), ("/readyz", 200), ("/metrics", 401), ("/cluster", 401), ("/v1/models", 401)):
        assert httpx.get(cluster.url + path, timeout=60).status_code == status, path
