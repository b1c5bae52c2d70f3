from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client.errors import RequestError
from bench.client.response import PlainBody, StreamedAnswer, server_message
from bench.record import Failure, Record
from tests.bench.client.scripted import DONE, HELLO, delta, event, new_record, usage


def count_words(text: str) -> int:
    return len(text.split())


def answer(*pieces: bytes, status: int = 200, counting: bool = False) -> tuple[Record, str]:
    """Feeds `pieces` to an answer at seconds 1, 2, …, and ends it."""
    record = new_record()
    made = StreamedAnswer(record, count_words if counting else None)
    failure = None
    try:
        made.head(status, {b"x-cpd-route": b"2p1d", b"x-cpd-decode-worker": b"combined-3"})
        for second, piece in enumerate(pieces, start=1):
            if made.body(piece, float(second)):
                break
        made.check(99.0)
    except RequestError as error:
        failure = error
    made.settle(99.0, failure)
    return record, made.text


def choice(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, **fields}]})


def test_a_complete_answer() -> None:
    record, text = answer(delta(role="assistant", content=""), *HELLO)
    assert text == "Hello"
    assert record.content_s == [2.0, 3.0]
    assert record.answer_s == 2.0
    assert record.ended_s == 6.0
    assert (record.error, record.status, record.finish_reason, record.route) == ("", 200, "length", "2p1d")
    assert record.worker == "combined-3"
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 2, None)


def test_a_first_chunk_with_only_a_role_is_no_content() -> None:
    for first in (delta(role="assistant"), delta(role="assistant", content=""), delta(role="assistant", content=None)):
        record, _ = answer(first, *HELLO)
        assert record.content_s == [2.0, 3.0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_generated_text_but_no_answer(name: str) -> None:
    record, text = answer(delta(**{name: "Hm"}), delta(content="Yes"), delta("stop"), DONE)
    assert text == "Yes"
    assert record.content_s == [1.0, 2.0]
    assert record.answer_s == 2.0


def test_a_tool_call_is_generated_text_but_no_answer() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    record, text = answer(delta(tool_calls=call), delta("tool_calls"), DONE)
    assert (record.error, text, record.content_s, record.answer_s) == ("", "", [1.0], None)


def test_text_of_the_completions_endpoint() -> None:
    record, text = answer(choice(text="Hel"), choice(text="lo", finish_reason="stop"), DONE)
    assert (text, record.content_s, record.answer_s, record.finish_reason) == ("Hello", [1.0, 2.0], 1.0, "stop")


def test_several_events_in_a_piece_came_at_the_same_time() -> None:
    record, _ = answer(b"".join(HELLO))
    assert record.content_s == [1.0, 1.0]


def test_usage_on_every_chunk_is_cumulative() -> None:
    tokens = [{"prompt_tokens": 9, "completion_tokens": done} for done in (1, 4)]
    chunks = [event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}], "usage": u}) for u in tokens]
    record, _ = answer(*chunks, DONE)
    assert (record.prompt_tokens, record.output_tokens) == (9, 4)


def test_cached_tokens() -> None:
    record, _ = answer(*HELLO[:3], usage(3, 2, cached=1), DONE)
    assert record.cached_tokens == 1


def test_malformed_usage_is_unknown() -> None:
    odd = {"prompt_tokens": None, "completion_tokens": "2", "prompt_tokens_details": None}
    record, _ = answer(*HELLO[:3], event({"choices": [], "usage": odd}), DONE)
    assert (record.error, record.prompt_tokens, record.output_tokens, record.cached_tokens) == ("", None, None, None)


def test_usage_may_come_without_choices() -> None:
    record, _ = answer(*HELLO[:3], event({"usage": {"completion_tokens": 2}}), DONE)
    assert (record.error, record.output_tokens) == ("", 2)


def test_without_usage_reasoning_and_answer_are_counted() -> None:
    chunks = (delta(reasoning="a b"), delta(content=" c d"), delta(content=" e"), delta("stop"), DONE)
    assert answer(*chunks, counting=True)[0].output_tokens == 5
    assert answer(*chunks)[0].output_tokens is None
    assert answer(*chunks[:4], usage(1, 7), DONE, counting=True)[0].output_tokens == 7


def test_a_tool_call_is_not_counted_without_usage() -> None:
    record, _ = answer(delta(content="a"), delta(tool_calls=[{}]), delta("stop"), DONE, counting=True)
    assert record.output_tokens is None


@pytest.mark.parametrize(
    ("pieces", "error", "detail"),
    [
        (HELLO[:2], Failure.INCOMPLETE, "without finish_reason and without [DONE]"),
        (HELLO[:4], Failure.INCOMPLETE, "without [DONE]"),
        ((*HELLO[:2], DONE), Failure.INCOMPLETE, "without finish_reason"),
        ((), Failure.INCOMPLETE, "without"),
        ((delta("stop"), DONE), Failure.EMPTY, "stop"),
        ((*HELLO[:2], b'data: {"choi'), Failure.INCOMPLETE, "without"),
        ((b"data: {nonsense}\n\n",), Failure.MALFORMED, "{nonsense}"),
        ((b"data: [1]\n\n",), Failure.MALFORMED, "[1]"),
        ((event({"hello": 1}),), Failure.MALFORMED, "hello"),
        ((event({"choices": [1]}),), Failure.MALFORMED, "choice"),
        ((choice(delta="a"),), Failure.MALFORMED, "delta"),
        ((choice(delta={"content": ["a"]}),), Failure.MALFORMED, "text"),
        ((choice(text=1),), Failure.MALFORMED, "text"),
        ((b"<html>\n\n<p>",), Failure.MALFORMED, "<html>"),
        ((b"Welcome to my server",), Failure.MALFORMED, "Welcome"),
        ((b'{"error": {"message": "No streams."}}',), Failure.MALFORMED, "No streams."),
        ((b'{\n\n"choices": []}',), Failure.MALFORMED, "server-sent event"),
        ((event({"error": {"message": "Out of memory."}}),), Failure.STREAM_ERROR, "Out of memory."),
        ((event({"error": "Out of memory."}),), Failure.STREAM_ERROR, "Out of memory."),
        ((event({"object": "error", "message": "Lost."}),), Failure.STREAM_ERROR, "Lost."),
        ((b"event: error\n" + event({"message": "Lost."}),), Failure.STREAM_ERROR, "Lost."),
        ((b"event: error\ndata: Lost.\n\n",), Failure.STREAM_ERROR, "Lost."),
        ((*HELLO[:2], event({"error": {"message": "Lost."}, "choices": []})), Failure.STREAM_ERROR, "Lost."),
        ((*HELLO[:2], delta("abort"), DONE), Failure.STREAM_ERROR, "abort"),
        ((*HELLO[:2], delta("error"), DONE), Failure.STREAM_ERROR, "error"),
    ],
)
def test_what_is_no_complete_answer(pieces: Sequence[bytes], error: str, detail: str) -> None:
    record, _ = answer(*pieces)
    assert record.error == error
    assert detail in record.detail
    assert record.ended_s > 0


def test_done_may_lack_its_blank_line() -> None:
    for end in (b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"):
        record, _ = answer(*HELLO[:4], end)
        assert (record.error, record.ended_s) == ("", 99.0)


def test_what_comes_after_done_is_ignored() -> None:
    record, text = answer(*HELLO[:4], DONE + delta(content="!"))
    assert (record.error, text) == ("", "Hello")


def test_the_status_is_an_error_and_the_body_says_why() -> None:
    record, text = answer(b'{"error": {"mess', b'age": "No such model."}}', status=404)
    assert (record.error, record.detail, record.status, text) == ("http_404", "No such model.", 404, "")


def test_an_error_page_without_end_is_cut() -> None:
    record, _ = answer(*[b"x" * 65536] * 3, status=502)
    assert (record.error, record.detail) == ("http_502", "x" * 300)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "a\\nb", "code": 1}}', "a b"),
        (b'{"error": "a"}', "a"),
        (b'{"object": "error", "message": "a"}', "a"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"[]", "[]"),
        (b" <h1>Bad  Gateway</h1>\n", "<h1>Bad Gateway</h1>"),
        (b"\xff" + b"a" * 400, "\ufffd" + "a" * 299),
        (b"", ""),
    ],
)
def test_messages_of_servers(body: bytes, message: str) -> None:
    assert server_message(body) == message


@given(st.lists(st.integers(0, 600)))
def test_cuts_do_not_change_the_answer(cuts: list[int]) -> None:
    body = b"".join((delta(role="assistant"), delta(reasoning="Hm\u00e4"), *HELLO))
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    record, text = answer(*(body[start:stop] for start, stop in pairwise(edges)))
    assert (record.error, text, len(record.content_s), record.output_tokens) == ("", "Hello", 3, 2)


def test_a_plain_body_has_an_end() -> None:
    body = PlainBody()
    with pytest.raises(RequestError, match="MiB"):
        body.body(b"x" * (17 << 20), 0.0)
