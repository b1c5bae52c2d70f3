import pickle

import orjson
import pytest

from bench.client.target import Target
from bench.errors import BenchError
from bench.settings import TargetSettings
from bench.workloads.base import Message

CONVERSATION = (Message("system", "Be brief. "), Message("user", "Why?"))


def target(**settings: object) -> Target:
    return Target.of(TargetSettings.model_validate(settings), "m")


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://a:8000", "http://a:8000"),
        ("http://a:8000/", "http://a:8000"),
        ("http://a:8000/v1", "http://a:8000"),
        ("https://a/v1/", "https://a"),
        ("https://a/models/x/v1", "https://a/models/x"),
        (" http://[::1]:8000 ", "http://[::1]:8000"),
    ],
)
def test_the_url_may_end_with_v1(given: str, base: str) -> None:
    assert target(url=given).url == base


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a:8000",
        "127.0.0.1:8000",
        "ftp://a",
        "http://",
        "http://a:x",
        "http://a:99999",
        "http://a:0",
        "http://[::1",
        "http://a b",
        "http://a/\r\nX: y",
        "http://ä",
        "http://u:p@a",
        "http://a?x=1",
        "http://a#x",
    ],
)
def test_a_url_that_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="--url"):
        target(url=url)


@pytest.mark.parametrize("extra", ["{", "[1]", "1", '{"stream": false}', '{"max_tokens": 1}'])
def test_an_extra_body_that_cannot_be_used_is_refused(extra: str) -> None:
    with pytest.raises(BenchError, match="--extra-body"):
        target(extra_body=extra)


def test_the_key_loses_its_line_end_and_may_hold_no_other() -> None:
    assert target(api_key="sk-1\n").api_key == "sk-1"
    with pytest.raises(BenchError, match="--api-key"):
        target(api_key="sk-1\r\nX: y")


def test_the_key_is_not_shown() -> None:
    assert "sk-1" not in repr(target(api_key="sk-1"))


def test_chat_sends_the_messages() -> None:
    assert orjson.loads(target(ignore_eos=False).body(CONVERSATION, 7)) == {
        "model": "m",
        "temperature": 0.0,
        "messages": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Why?"}],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_sends_one_prompt() -> None:
    asked = target(endpoint="completions")
    assert asked.path == "/v1/completions"
    body = orjson.loads(asked.body(CONVERSATION, 7))
    assert body["prompt"] == "Be brief. Why?"
    assert body["ignore_eos"] is True
    assert "messages" not in body


def test_extra_fields_go_over_the_settings() -> None:
    body = orjson.loads(target(extra_body='{"temperature": 1, "top_p": 0.5}').body(CONVERSATION, 7))
    assert (body["temperature"], body["top_p"]) == (1, 0.5)


def test_it_can_be_sent_to_another_process() -> None:
    made = target(extra_body='{"a": 1}')
    assert pickle.loads(pickle.dumps(made)) == made
