"""The arguments of a tool call that a model made: they may be cut, or no JSON."""

from typing import Any

import orjson
from pydantic_core import from_json

from router.text.parsers.json_strings import JsonStrings


def read_arguments(text: str) -> Any:
    """Returns the value of arguments: `text` as JSON, or what came of it."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
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
