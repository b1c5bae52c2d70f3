"""Inputs of tool calls are JSON that strict parsers take, however the model's text is cut."""

import itertools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.anthropic_messages.tool_input import StrictJson, tool_input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _input(text: str) -> Any:
    return json.loads(orjson.dumps({"input": tool_input(text)}))["input"]


@given(value=st.dictionaries(st.text(), JSON, max_size=3), data=st.data())
def test_valid_json_is_passed_on_as_it_is(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(0, len(text)))
    strict = StrictJson()
    assert strict.push(text[:cut]) + strict.push(text[cut:]) == text
    assert _input(text) == value


@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_line_breaks_in_strings_are_escaped(cuts: list[int]) -> None:
    text = '{\n"a\\"": "x\ny\\\\",\t"b": "\t\\n\r"\n}'
    strict, edges = StrictJson(), [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    written = "".join(strict.push(text[start:end]) for start, end in itertools.pairwise(edges))
    assert json.loads(written) == {'a"': "x\ny\\", "b": "\t\n\r"}
    assert json.loads(written) == json.loads(text, strict=False)


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
