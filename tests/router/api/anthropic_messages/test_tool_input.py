"""Inputs of tool calls, complete and cut."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.anthropic_messages.tool_input import tool_input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _input(text: str) -> Any:
    return json.loads(orjson.dumps({"input": tool_input(text)}))["input"]


@given(value=st.dictionaries(st.text(), JSON, max_size=3))
def test_a_complete_input_is_the_same(value: dict[str, Any]) -> None:
    assert _input(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"a', {}),
        ('{"a": ', {}),
        ('{"a": 1, "b": [1, 2', {"a": 1, "b": [1, 2]}),
        ('{"a": {"b": true}, "c": "x', {"a": {"b": True}}),
        ('{"a": 123456789012345678901234567890, "b', {"a": 123456789012345678901234567890}),
        ("[" * 5000, {}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_cut_input_is_what_came_of_it(text: str, value: Any) -> None:
    assert _input(text) == value


def test_numbers_and_escapes_stay_as_they_are() -> None:
    text = '{"a": 123456789012345678901234567890, "b": 1.50, "c": "\\ud800"}'
    assert orjson.dumps({"input": tool_input(text)}).decode() == '{"input":' + text + "}"
