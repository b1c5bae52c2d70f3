"""Messages as a newer minor version of the protocol may send them."""

from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message

from cpd.common.stream import Stream

M = TypeVar("M", bound=Message)

_UNKNOWN_FIELD = b"\xc2\x3e\x03new"
"""Field 1000, of 3 bytes."""


def unknown_kind(message: type[M]) -> M:
    """Returns a message of a kind that this version does not know."""
    return message.FromString(_UNKNOWN_FIELD)


def with_unknown_fields(message: M) -> M:
    """Returns a copy with an unknown field in it and in all messages inside it."""
    copy = type(message)()
    copy.CopyFrom(message)
    _add(copy)
    assert copy.SerializeToString() != message.SerializeToString()
    return copy


def _add(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                _add(one)
    message.MergeFromString(_UNKNOWN_FIELD)


_HANDSHAKE = {"hello", "challenge", "proof"}


def speak_newer(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Makes all processes of a test newer ones, which send unknown fields, and messages of unknown kinds after each
    known one. Returns a set with the kinds of the known messages that were sent, which grows."""
    kinds: set[str] = set()
    send = Stream.send

    def note(message: Any) -> None:
        kind = message.WhichOneof("kind")
        kinds.add(f"{type(message).__name__}.{kind}")
        if kind == "prefill":
            note(message.prefill)
        for one in message.batch.messages if kind == "batch" else ():
            note(one)

    def send_as_newer(self: "Stream[Any]", message: Any) -> None:
        note(message)
        kind = message.WhichOneof("kind")
        send(self, with_unknown_fields(message))
        if kind not in _HANDSHAKE:
            send(self, unknown_kind(type(message)))
        if kind == "prefill":
            send(self, type(message)(prefill=unknown_kind(type(message.prefill))))

    monkeypatch.setattr(Stream, "send", send_as_newer)
    return kinds
