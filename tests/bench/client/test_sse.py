from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client.sse import MAX_EVENT_BYTES, EventSplitter


def split(*pieces: bytes) -> list[tuple[bytes, bytes]]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)]


def test_several_events_in_one_piece() -> None:
    assert split(b"data: a\n\ndata: b\n\n") == [(b"", b"a"), (b"", b"b")]


def test_an_event_is_given_with_the_piece_that_ends_it() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\nda") == [(b"", b"a")]
    assert splitter.pending == b"da"


@pytest.mark.parametrize(
    ("block", "event"),
    [
        (b"data:a\n\n", (b"", b"a")),
        (b"data:  a \n\n", (b"", b" a ")),
        (b"data: a\ndata: b\n\n", (b"", b"a\nb")),
        (b"event: error\ndata: a\n\n", (b"error", b"a")),
        (b"id: 7\nretry: 10\ndata: a\n\n", (b"", b"a")),
        (b": note\ndata: a\n\n", (b"", b"a")),
        (b"\n\n\ndata: a\n\n", (b"", b"a")),
    ],
)
def test_forms_of_an_event(block: bytes, event: tuple[bytes, bytes]) -> None:
    assert split(block) == [event]


@pytest.mark.parametrize("block", [b": ping\n\n", b"data\n\n", b"data:\n\n", b"event: ping\n\n", b"\n\n\n\n"])
def test_events_without_data_are_left_out(block: bytes) -> None:
    assert split(block) == []


@pytest.mark.parametrize("text", [b"<html>\n\n", b'{"id": 1}\n\n', b"data: a\nnonsense\n\n"])
def test_something_else_than_events_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a server-sent event"):
        split(text)


def test_an_event_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        split(*[b"x" * 65536] * (MAX_EVENT_BYTES // 65536 + 1))


payloads = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).filter(lambda t: t.strip())


@given(
    events=st.lists(st.lists(payloads, min_size=1, max_size=3), max_size=5),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_neither_cuts_nor_line_ends_change_the_events(events: list[list[str]], end: bytes, cuts: list[int]) -> None:
    body = b"".join(b"".join(b"data: " + line.encode() + end for line in event) + end for event in events)
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    pieces = [body[start:stop] for start, stop in pairwise(edges)]
    assert split(*pieces) == [(b"", "\n".join(event).encode()) for event in events]
