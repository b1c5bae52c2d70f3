"""JSON that models write becomes what strict parsers take, however it is cut into pieces."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.anthropic_messages.strict_json import StrictJson

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
WITH_LINE_BREAKS = '{\n"a\\"": "x\ny\\\\",\t"b": "\t\\n\r"\n}'


def _written(text: str, cuts: list[int]) -> str:
    strict, edges = StrictJson(), [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return "".join(strict.push(text[start:end]) for start, end in itertools.pairwise(edges))


@given(
    value=st.dictionaries(st.text(), JSON, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    indent=st.none() | st.just(1),
)
def test_valid_json_stays_as_it_is(value: Any, cuts: list[int], indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    assert _written(text, cuts) == text


@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_line_breaks_in_strings_are_escaped(cuts: list[int]) -> None:
    written = _written(WITH_LINE_BREAKS, cuts)
    assert json.loads(written) == {'a"': "x\ny\\", "b": "\t\n\r"}
    assert json.loads(written) == json.loads(WITH_LINE_BREAKS, strict=False)


@pytest.mark.parametrize("scalar", ["True", "None", "-1.5e+3", "01", ".5"])
def test_a_number_or_word_waits_for_what_follows(scalar: str) -> None:
    strict = StrictJson()
    written = "".join(map(strict.push, '{"a": "True", "b": ' + scalar))
    assert written == '{"a": "True", "b": '
    assert strict.push("}") == scalar + "}"
