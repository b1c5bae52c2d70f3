"""From a body of the Messages API to a request."""

import json
from typing import TypeVar

from router.api.anthropic_messages.request import CountTokensRequest
from router.api.call_arguments import has_long_number
from router.api.parse import load, taken, validated

R = TypeVar("R", bound=CountTokensRequest)


def parse_messages(body: bytes, kind: type[R]) -> R:
    """Does what `parse_body` does, and integers of any size in a call's input stay as they are.

    Raises:
        ApiError: The body is not valid; the error names the field.
    """
    fields = taken(load(body), kind)
    # the first test is much faster, and false for many bodies
    if b'"tool_use"' in body and has_long_number(body) and "messages" in fields:
        fields["messages"] = json.loads(body)["messages"]
    return validated(body, fields, kind)
