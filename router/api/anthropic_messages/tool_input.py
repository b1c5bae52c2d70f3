"""The input of a tool call, complete or cut."""

import json
from typing import Any

import orjson
from pydantic_core import from_json


def tool_input(text: str) -> orjson.Fragment:
    """Returns the input of a call as JSON: `text` as the model wrote it, or what came of it before it was cut."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return orjson.Fragment(json.dumps(_begun(text)))
    return orjson.Fragment(text)


def _begun(text: str) -> dict[str, Any]:
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
