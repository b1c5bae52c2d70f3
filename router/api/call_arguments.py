"""The arguments of a tool call that a model made: they may be cut, or no JSON."""

import json
from typing import Any

import orjson
from pydantic_core import from_json

from router.text.parsers.json_strings import JsonStrings

_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def has_long_number(text: bytes) -> bool:
    """True if JSON may have integers of more than 64 bits. orjson makes them floats, which have other values."""
    return b"0" * 19 in text.translate(_AS_ZEROS)


def read_arguments(text: str) -> Any:
    """Returns the value of arguments: `text` as JSON, or what came of it."""
    try:
        value = orjson.loads(text)
        return json.loads(text) if has_long_number(text.encode()) else value
    except (ValueError, RecursionError):
        return begun(text)


def begun(text: str) -> dict[str, Any]:
    """Returns the object that `text` begins, up to where it was cut; an empty one if it is no JSON before that.

    Strings may have line breaks, as models write them.
    """
    try:
        value = from_json(JsonStrings().push(text), allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
