"""The input of a tool call, complete or cut."""

import json

import orjson

from router.api.call_arguments import begun


def tool_input(text: str) -> orjson.Fragment:
    """Returns the input of a call as JSON: `text` as the model wrote it, or what came of it before it was cut."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return orjson.Fragment(json.dumps(begun(text)))
    return orjson.Fragment(text)
