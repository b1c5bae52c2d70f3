from typing import Any

import orjson
import pytest

from bench.mock.answer import WORD, Request, Step, answer
from bench.mock.behaviour import Answering


def request(**changed: Any) -> Request:
    fields: dict[str, Any] = {
        "number": 0,
        "chat": True,
        "model": "mock",
        "prompt": "one two three",
        "max_tokens": 4,
        "stream": True,
        "include_usage": True,
    }
    return Request(**{**fields, **changed})


def steps(how: Answering, **changed: Any) -> list[Step]:
    return list(answer(request(**changed), how))


def events(steps: list[Step]) -> list[Any]:
    """The data of the events: parsed JSON, or the text if it is not JSON."""
    body = b"".join(step.payload for step in steps).partition(b"\r\n\r\n")[2]
    made = []
    for line in body.splitlines():
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ")
            made.append(orjson.loads(data) if data.startswith(b'{"') else data.decode())
    return made


def deltas(steps: list[Step]) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events(steps) if isinstance(event, dict) and event["choices"]]


def test_a_stream_has_its_first_text_after_ttft_and_the_others_itl_apart() -> None:
    content = [step for step in steps(Answering(ttft_ms=50, itl_ms=5)) if step.content]
    assert [step.at_s for step in content] == pytest.approx([0.05, 0.055, 0.06, 0.065])


def test_a_stream_ends_with_its_finish_reason_its_usage_and_done() -> None:
    made = steps(Answering(cached_tokens=2))
    *_, finish, usage, done = events(made)
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert done == "[DONE]"
    assert made[-1].payload.endswith(b"0\r\n\r\n")
    assert [delta["content"] for delta in deltas(made)[:-1]] == [WORD] * 4


def test_usage_comes_only_if_it_is_asked_for() -> None:
    assert all("usage" not in event for event in events(steps(Answering(), include_usage=False))[:-1])


def test_a_server_without_usage_sends_none_though_asked() -> None:
    assert all("usage" not in event for event in events(steps(Answering(usage="none")))[:-1])


def test_usage_on_every_chunk_is_cumulative() -> None:
    counts = [event["usage"]["completion_tokens"] for event in events(steps(Answering(usage="every")))[:4]]
    assert counts == [1, 2, 3, 4]


def test_the_last_chunk_has_the_tokens_that_are_left() -> None:
    texts = [delta["content"] for delta in deltas(steps(Answering(tokens_per_chunk=3)))[:-1]]
    assert texts == [WORD * 3, WORD]


def test_completions_have_texts_instead_of_deltas() -> None:
    texts = [event["choices"][0]["text"] for event in events(steps(Answering(), chat=False))[:4]]
    assert texts == [WORD] * 4


def test_the_chunk_with_the_role_comes_at_once_and_is_no_content() -> None:
    _, role, *_ = made = steps(Answering(role_first=True))
    assert (role.at_s, role.content) == (0.0, False)
    assert deltas(made)[0] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("opening", "delta"),
    [
        ("reasoning_content", {"reasoning_content": WORD}),
        ("reasoning", {"reasoning": WORD}),
        ("tool_calls", {"tool_calls": [{"index": 0, "function": {"arguments": WORD}}]}),
    ],
)
def test_the_first_tokens_can_be_no_content(opening: Any, delta: Any) -> None:
    made = deltas(steps(Answering(opening=opening, opening_tokens=2)))
    assert made[:3] == [delta, delta, {"content": WORD}]


def test_finish_reason_and_done_can_be_missing() -> None:
    made = events(steps(Answering(no_finish_reason=True, no_done=True)))
    assert "[DONE]" not in made
    assert all(choice["finish_reason"] is None for event in made for choice in event["choices"])


def test_the_number_of_tokens_can_be_fixed() -> None:
    assert sum(step.content for step in steps(Answering(output_tokens=7))) == 7
    assert sum(step.content for step in steps(Answering(output_tokens=0))) == 0


@pytest.mark.parametrize("fault", ["garbage", "error", "cut", "reset", "hang"])
def test_a_fault_comes_after_the_chunks_before_it_and_nothing_is_complete(fault: Any) -> None:
    made = steps(Answering(fault=fault, fault_after=2))
    assert sum(step.content for step in made) == 2
    assert "[DONE]" not in events(made)
    assert made[-1].then == {"cut": "close", "reset": "reset"}.get(fault, "")


def test_a_status_or_a_json_body_comes_instead_of_a_stream() -> None:
    (failed,) = steps(Answering(fault="status", status=429))
    assert failed.payload.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    (whole,) = steps(Answering(fault="json", ttft_ms=50, itl_ms=5))
    assert whole.at_s == pytest.approx(0.065)
    assert b"application/json" in whole.payload


def test_without_a_stream_the_same_text_comes_as_one_body() -> None:
    (whole,) = steps(Answering(), stream=False)
    body = orjson.loads(whole.payload.partition(b"\r\n\r\n")[2])
    assert body["choices"][0]["message"]["content"] == WORD * 4
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.9, 1.0])
def test_faults_are_spread_evenly_over_the_requests(share: float) -> None:
    how = Answering(fault="status", fault_share=share)
    failed = [len(list(answer(request(number=number), how))) == 1 for number in range(120)]
    for begin in (0, 30, 60, 90):
        assert sum(failed[begin : begin + 30]) == pytest.approx(30 * share, abs=1)
