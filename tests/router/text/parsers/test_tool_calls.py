"""Outputs written from each format's documentation, whole and in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from router.text.parsers.output import TOOL_PARSERS, OutputFormat, OutputParser, joined

TOOLS = ("get_weather", "add", "now")

Calls = list[tuple[str, str]]
"""Names and arguments."""


def parse(parser: OutputParser, *pieces: str, cut: bool = False) -> tuple[str, Calls]:
    """Returns the content and the calls of an output in pieces; checks the events' order."""
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)] + parser.flush(cut=cut)
    content, calls = "", list[list[str]]()
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case CallStart(index, id, name):
                assert index == len(calls)
                assert id
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert text
                calls[index][1] += text
            case Reasoning():
                raise AssertionError("there is no reasoning")
    assert parser.has_calls == bool(calls)
    return content, [(name, arguments) for name, arguments in calls]


def new(name: str, **options: Any) -> OutputParser:
    return OutputParser(None, TOOL_PARSERS[name](frozenset(TOOLS)), **options)


WEATHER = '{"city": "Zürich \\"ZH\\"", "days": [1, 2.5e3, -0], "unit": null, "o": {"a": {}, "b": [[], true]}}'

CASES: dict[str, tuple[str, str, str, Calls]] = {
    "hermes": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "",
        [("get_weather", WEATHER)],
    ),
    "hermes, text before and two calls": (
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b":2}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
        "Let me look.",
        [("add", '{"a": 1,  "b":2}'), ("now", "{}")],
    ),
    "hermes, text behind": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\nThat is all. ',
        "\nThat is all.",
        [("now", "{}")],
    ),
    "hermes, no closing tag": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "add", "arguments": {"a": 1}}',
        "",
        [("now", "{}"), ("add", '{"a": 1}')],
    ),
    "hermes, a brace too few": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "hermes, a tool that does not exist": (
        "hermes",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "",
        [("other", "{}")],
    ),
    "hermes, a line break in a string": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("add", '{"a": "x\\ny"}')],
    ),
    "hermes, tags within the arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>',
        "",
        [("add", '{"a": "</tool_call><tool_call>"}')],
    ),
    "hermes, the second attempt is a call": (
        "hermes",
        '<tool_call>no<tool_call> {"name": "now", "arguments": {}}</tool_call>',
        "<tool_call>no",
        [("now", "{}")],
    ),
    "llama": (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {WEATHER}}}',
        "",
        [("get_weather", WEATHER)],
    ),
    "llama, with the tag": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "other", "parameters": {"a": 1}}',
        "",
        [("other", '{"a": 1}')],
    ),
    "llama, several": (
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": ";"}} ;\n'
        '<|python_tag|>{"name": "now", "parameters": {}}',
        "",
        [("now", "{}"), ("add", '{"a": ";"}'), ("now", "{}")],
    ),
    "llama, text before the tag": (
        "llama3_json",
        'I look. <|python_tag|>{"name": "now", "parameters": {}}',
        "I look.",
        [("now", "{}")],
    ),
    "pythonic": (
        "pythonic",
        "[get_weather(city='Zü\\'rich', days=[1, -2.5], unit=None), now(),\n add(a={'x': True}, b=\"),(\")]",
        "",
        [
            ("get_weather", '{"city": "Zü\'rich", "days": [1, -2.5], "unit": null}'),
            ("now", "{}"),
            ("add", '{"a": {"x": true}, "b": "),("}'),
        ],
    ),
    "pythonic, with llama 4's tokens": (
        "pythonic",
        "<|python_start|>[add(a=1, b=2)]<|python_end|>",
        "",
        [("add", '{"a": 1, "b": 2}')],
    ),
    "mistral, a list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [("get_weather", WEATHER), ("now", "{}")],
    ),
    "mistral, names": (
        "mistral",
        f'Sure.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]now[CALL_ID]abc123xyz[ARGS]{{}}[TOOL_CALLS]add{{"a":1}}',
        "Sure.",
        [("get_weather", WEATHER), ("now", "{}"), ("add", '{"a":1}')],
    ),
    "json": ("json", f' {{"name": "get_weather", "arguments": {WEATHER}}}\n', "", [("get_weather", WEATHER)]),
    "json, a list": (
        "json",
        '[{"name": "now", "parameters": {}}, {"name": "add", "arguments": {"a": 1}}]',
        "",
        [("now", "{}"), ("add", '{"a": 1}')],
    ),
}

NO_CALLS: dict[str, list[str]] = {
    "hermes": [
        "",
        " \n",
        "Just text with <tool> and <tool_call",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call> nothing </tool_call>\n",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call> ',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{name: "add", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "add", "name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"x": 01, "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"x": "\\q", "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"x": "\\u12g4", "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"x": [1 2], "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", ',
    ],
    "llama3_json": [
        '{"name": "Alice", "parameters": {}}',
        '{"answer": 42}',
        ' {"name": "add"}; and so on',
        '<|python_tag|>print("hi")\n',
        "<|python_tag|>",
        'Call {"name": "add", "parameters": {}}',
        "{",
    ],
    "pythonic": [
        "[1, 2]",
        "[add(1, 2)]",
        "[add(a=b)]",
        "[add(a=now())]",
        "[add(**{'a': 1})]",
        "[add(a={1, 2})]",
        "[add(a=1e999)]",
        "[add(a=1, a=2)]",
        "[print(a=1)]",
        "[add",
        "[add(a=1",
        "<|python_start|>import os",
        "[",
        "add(a=1)",
        "[add(a=" + "-" * 50_000 + "1)]",
        "[add(a=" + "[" * 5_000 + "]" * 5_000 + ")]",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        '[TOOL_CALLS] ["add"]',
        "[TOOL_CALLS]add and so on",
        "[TOOL_CALLS]add[ARGS]",
        "[TOOL_CALLS]" + "a" * 300 + "{}",
        '[TOOL_CALLS][{"name": "add"}]',
        "[TOOL",
    ],
    "json": ['{"name": "Alice", "arguments": {}}', "[1]", "[]", "text", '{"a": 1}', "[{}]", '"name"', "[", "{ "],
}


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES.values(), ids=CASES.keys())
def test_calls_and_content_are_found(family: str, text: str, content: str, calls: Calls) -> None:
    assert parse(new(family), text) == (content, calls)
    assert parse(new(family), *text) == (content, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments, strict=False), dict)


@pytest.mark.parametrize(("family", "text"), [(family, text) for family in NO_CALLS for text in NO_CALLS[family]])
def test_what_is_no_call_is_content_as_written(family: str, text: str) -> None:
    assert parse(new(family), text) == (text, [])
    if len(text) < 1_000:
        assert parse(new(family), *text) == (text, [])


@st.composite
def _texts(draw: st.DrawFn) -> tuple[str, str]:
    """A format, and an output that is a case, a part of one, or several in a row."""
    family = draw(st.sampled_from(sorted(TOOL_PARSERS)))
    known = [text for name, text, _, _ in CASES.values() if name == family] + NO_CALLS[family]
    known = [text for text in known if len(text) < 1_000]
    parts = draw(st.lists(st.one_of(st.sampled_from(known), st.text('{}[]",:\\ \n<>a1;', max_size=8)), max_size=3))
    text = "".join(parts)
    return family, text[: draw(st.integers(0, len(text)))]


@given(case=_texts(), data=st.data(), cut=st.booleans())
def test_the_pieces_of_an_output_do_not_change_the_result(
    case: tuple[str, str], data: st.DataObject, cut: bool
) -> None:
    family, text = case
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert (
        parse(new(family), *pieces, cut=cut) == parse(new(family), text, cut=cut) == parse(new(family), *text, cut=cut)
    )


@given(arguments=st.dictionaries(st.text(max_size=5), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
), max_size=3), ascii_only=st.booleans())  # fmt: skip
def test_arguments_that_are_json_are_exactly_the_text_that_the_model_wrote(
    arguments: dict[str, Any], ascii_only: bool
) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    for family, written in (
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>'),
        ("llama3_json", f'{{"name": "add", "parameters": {text}}}'),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{text}"),
        ("json", f'[{{"name": "add", "arguments": {text}}}]'),
    ):
        assert parse(new(family), *written) == ("", [("add", text)])


def test_line_breaks_in_the_strings_of_arguments_are_escaped() -> None:
    raw = '{\n"code": "a\n\tb\\n\\"\r",\t"b": "\\\\"}'
    strict = '{\n"code": "a\\n\\tb\\n\\"\\r",\t"b": "\\\\"}'
    assert json.loads(strict) == json.loads(raw, strict=False)
    for family, written in (
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {raw}}}</tool_call>' * 2),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{raw}" * 2),
        ("json", f'[{{"name": "add", "arguments": {raw}}}, {{"name": "add", "arguments": {raw}}}]'),
    ):
        for pieces in ([written], written):
            assert parse(new(family), *pieces) == ("", [("add", strict), ("add", strict)])


@pytest.mark.parametrize(("family", "text"), [case[:2] for case in CASES.values()], ids=CASES.keys())
def test_a_call_that_is_cut_has_its_arguments_so_far(family: str, text: str) -> None:
    _, whole = parse(new(family), text)
    last = -1
    for end in range(len(text)):
        _, calls = parse(new(family), text[:end], cut=True)
        assert len(calls) in (last, last + 1)
        last = len(calls)
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, whole, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)
    assert last <= len(whole)


def test_arguments_arrive_as_they_are_written() -> None:
    parser = new("hermes")
    assert parser.push('<tool_call>{"name": "add", "arguments": ') == []
    start, arguments = parser.push('{"a": "x')
    assert isinstance(start, CallStart)
    assert arguments == CallArguments(0, '{"a": "x')
    assert parser.push("y") == [CallArguments(0, "y")]
    assert parser.push('"}}') == [CallArguments(0, '"}')]
    assert parser.push("\n</tool_call>") == []
    assert parser.flush(cut=False) == []


def test_content_arrives_as_it_is_written() -> None:
    parser = new("hermes")
    assert [parser.push(text) for text in ("It", " is", " <", "b>")] == [
        [Content("It")],
        [Content(" is")],
        [],
        [Content(" <b>")],
    ]


def test_arguments_that_are_no_json_end_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": \'x\'}}</tool_call>'
    assert parse(new("hermes"), text) == ("'x'}}</tool_call>", [("add", '{"a": ')])


def test_only_the_first_call_is_kept_if_the_client_wants_no_more() -> None:
    text = "[now(), add(a=1)]"
    assert parse(new("pythonic", parallel=False), text) == ("", [("now", "{}")])


def test_ids_differ_and_have_the_form_that_templates_demand() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    ids = [event.id for event in new("mistral").push(text) if isinstance(event, CallStart)]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    (start,) = [
        event
        for event in new("mistral").push("[TOOL_CALLS]now[CALL_ID]abc123xyz[ARGS]{")
        if isinstance(event, CallStart)
    ]
    assert start.id == "abc123xyz"


def test_an_object_that_is_nested_deep_is_read_without_recursion() -> None:
    arguments = '{"a": ' + "[" * 100_000
    assert parse(new("hermes"), '<tool_call>{"name": "add", "arguments": ' + arguments, cut=True)[1] == [
        ("add", arguments)
    ]


def test_events_of_one_kind_are_joined() -> None:
    start = CallStart(1, "b", "f")
    assert joined(
        [Content("a"), Content("b"), Reasoning("c"), CallArguments(0, "{"), CallArguments(0, "}"), start, start]
    ) == [Content("ab"), Reasoning("c"), CallArguments(0, "{}"), start, start]
    assert joined([CallArguments(0, "{"), CallArguments(1, "{")]) == [CallArguments(0, "{"), CallArguments(1, "{")]


def test_markers_are_those_of_the_parsers_in_use() -> None:
    form = OutputFormat("llama3_json", "think")
    assert form.markers(tools=False) == {"<think>", "</think>"}
    assert form.markers(tools=True) == {"<think>", "</think>", "<|python_tag|>"}
