"""From the bytes of a body to the fields of a request, and errors that name the field."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from router.api.strict_model import UNSUPPORTED, Body
from router.errors import ApiError, invalid, unsupported

MAX_PARTS = 1 << 14
"""Limit on the messages of a chat plus the parts of their contents; that many take a tenth of a second."""

MAX_DEPTH = 256
"""Limit on the levels of lists and objects in a body, which is the first level. Recursive functions walk a body, and
Python allows 1,000 nested calls."""

MAX_COMPLAINTS = 1_000
"""A request with more errors than this is refused without naming the first one."""

_FORM = re.compile(r"<[a-z_ ]+>|\[key\]")
"""What pydantic puts into the paths of its errors: the form of a value, and that an error is about a key."""

_PARTS = ("content", "output", "summary")
"""Names of fields that have the parts of a message, or of a part."""

_TEXTS = frozenset({"content", "output", "text", "refusal", "reasoning", "reasoning_content", "thinking", "input"})
"""Names of fields of a message, and of its parts, that may have NUL characters: results of tools have them."""

B = TypeVar("B", bound=Body)


def parse_body(body: bytes, kind: type[B], defaults: Mapping[str, Any] = MappingProxyType({})) -> B:
    """Parses a body and checks its fields one by one.

    Args:
        defaults: Values of fields that the body leaves out.

    Raises:
        ApiError: The body is not valid; the error names the field.
    """
    return validated(body, taken(load(body), kind), kind, defaults)


def load(body: bytes) -> dict[str, Any]:
    """Returns a body's fields.

    Raises:
        ApiError: It is no JSON object, or nested too deeply.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("depth limit"):  # orjson's own is 1,024
            raise _too_deep() from None
        raise invalid(None, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object.", code="invalid_type")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:  # with fewer it can't be too deep
        _check_depth(data)
    return data


def taken(fields: dict[str, Any], kind: type[Body]) -> dict[str, Any]:
    """Removes the fields that are not honoured, and returns the others.

    Raises:
        ApiError: One that is not supported would have an effect.
    """
    passing_fields, harmless = _not_honoured(kind)
    for name in passing_fields & fields.keys():
        value = fields.pop(name)
        if not any(_same(value, passing) for passing in (None, *_passing(name, fields, kind))):
            raise unsupported(name)
    for name in harmless & fields.keys():
        del fields[name]
    return fields


@cache
def _not_honoured(kind: type[Body]) -> tuple[frozenset[str], frozenset[str]]:
    """The fields that are refused with most values, and those that are ignored."""
    honoured = kind.model_fields.keys()
    return frozenset(kind.PASSING) - honoured, kind.HARMLESS - honoured


def validated(
    body: bytes, fields: dict[str, Any], kind: type[B], defaults: Mapping[str, Any] = MappingProxyType({})
) -> B:
    """Checks the fields of a body one by one.

    Args:
        body: The body that the fields are from.

    Raises:
        ApiError: A field is not valid.
    """
    for name in kind.ENTRIES:
        if _num_parts(fields.get(name)) > MAX_PARTS:
            raise invalid(name, f"'{name}' must be at most {MAX_PARTS} messages and parts of their contents.")
    # the first test is much faster, and false for most bodies
    if b"\\" in body and b"\\u0000" in body:
        _refuse_nul(fields, kind.ENTRIES)
    if b"null" in body:
        fields = _drop_nulls(fields, kind.VERBATIM)
    try:
        return kind.model_validate({**defaults, **fields})
    except ValidationError as error:
        raise explained(error) from None


def explained(error: ValidationError) -> ApiError:
    """Returns the first of pydantic's errors in OpenAI's format."""
    if error.error_count() > MAX_COMPLAINTS:  # to list them takes seconds
        return invalid(None, f"The body has {error.error_count()} errors.")
    first = error.errors(include_url=False)[0]
    *outer, last = first["loc"]
    # the last part can be any name that the client sent; the others are fields or forms
    path = [part for part in outer if not _is_form(part)]
    if not _is_form(last) or first["type"] == "extra_forbidden":
        path.append(last)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    match first["type"]:
        case "missing":
            return invalid(param, f"Missing required parameter: '{param}'.", code="missing_required_parameter")
        case "extra_forbidden":
            return invalid(param, f"Unrecognized request argument supplied: {param}", code="unknown_parameter")
        case kind if kind == UNSUPPORTED:
            return invalid(param, f"Invalid value for '{param}': {first['msg']}.", code="unsupported_parameter")
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return invalid(param, f"Invalid value for '{param}': {first['msg']}.", code=code)


def _is_form(part: int | str) -> bool:
    return isinstance(part, str) and _FORM.fullmatch(part) is not None


def _check_depth(data: dict[str, Any]) -> None:
    """Raises ApiError if lists and objects are nested deeper than MAX_DEPTH."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        items = (value.values() if type(value) is dict else value for value in level)
        level = [item for each in items for item in each if type(item) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return invalid(None, f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")


def _passing(name: str, fields: Mapping[str, Any], kind: type[Body]) -> tuple[Any, ...]:
    # with best_of = n there is no choice among the outputs
    return (fields.get("n") or 1,) if name == "best_of" else kind.PASSING[name]


def _same(value: Any, passing: Any) -> bool:
    return type(value) is type(passing) and value == passing  # in Python, 0 equals False


def _num_parts(entries: Any) -> int:
    """Returns the number of messages and of their parts, at most two levels deep."""
    if not isinstance(entries, list):
        return 0
    parts = _parts_of(entries)
    return len(entries) + len(parts) + len(_parts_of(parts))


def _parts_of(entries: list[Any]) -> list[Any]:
    found = (entry.get(name) for entry in entries if isinstance(entry, dict) for name in _PARTS)
    return [part for parts in found if isinstance(parts, list) for part in parts]


def _drop_nulls(value: Any, verbatim: frozenset[str]) -> Any:
    """Removes fields that are null, at any depth. Chat templates expect that, too."""
    if isinstance(value, dict):
        return {
            key: item if key in verbatim else _drop_nulls(item, verbatim)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_drop_nulls(item, verbatim) for item in value]
    return value


def _refuse_nul(fields: Mapping[str, Any], entries: Sequence[str]) -> None:
    """Raises ApiError if a string has a NUL character, and is not the text of a message."""
    for name, value in fields.items():
        texts = _TEXTS | {name} if name in entries else frozenset()
        if (path := _find_nul({name: value}, texts)) is not None:
            raise invalid(path, f"'{path}' contains a NUL character, which is only allowed in the texts of messages.")


def _find_nul(value: Any, texts: frozenset[str], path: str = "") -> str | None:
    """Returns the path of the first string with a NUL character in `value`, but for those of fields in `texts`."""
    if isinstance(value, str):
        return path if "\0" in value else None
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [
            (f"{path}.{key}" if path else key, item)
            for key, item in value.items()
            if isinstance(item, list) or key not in texts
        ]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return next((found for name, item in items if (found := _find_nul(item, texts, name)) is not None), None)
