import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.parsers.events import CallStart, Content, Event, Reasoning
from router.text.parsers.output import OutputFormat, detect
from router.text.parsers.reasoning import TAGS, ReasoningParser
from tests.router.text.test_template import TEMPLATES


def _parse(*pieces: str, inside: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(TAGS["think"], inside=inside)
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    first_content = next((i for i, event in enumerate(events) if isinstance(event, Content)), len(events))
    assert not any(isinstance(event, Reasoning) for event in events[first_content:])
    return reasoning, content


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nI see.\n\nSo.\n</think>\n\nYes. ", False, "I see.\n\nSo.", "Yes. "),
        ("\n<think>a</think>b", False, "a", "b"),
        ("I see.\n</think>\n\nYes.", True, "I see.", "Yes."),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>\nI s", False, "I s", ""),
        ("I s</thi", True, "I s</thi", ""),
        (" Yes. <think>", False, "", " Yes. <think>"),
        ("Yes.</think>", False, "", "Yes.</think>"),
        ("<thin", False, "", "<thin"),
        (" ", False, "", " "),
        ("", True, "", ""),
        ("<think>a</think>\n", False, "a", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert _parse(text, inside=inside) == (reasoning, content)
    assert _parse(*text, inside=inside) == (reasoning, content)


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", "</thi", "b c"]), max_size=8),
    inside=st.booleans(),
    data=st.data(),
)
def test_the_pieces_of_an_output_do_not_change_the_result(parts: list[str], inside: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert _parse(*pieces, inside=inside) == _parse(text, inside=inside)


def test_an_output_that_begins_in_the_prompt_is_recognised_by_the_prompts_end() -> None:
    form = OutputFormat("", "think")
    assert form.parser("…assistant\n<think>\n", (), parallel=True).push("a") == [Reasoning("a")]
    assert form.parser("…<think>\n\n</think>\n\n", (), parallel=True).push("a") == [Content("a")]


def test_calls_come_behind_the_reasoning() -> None:
    parser = OutputFormat("hermes", "think").parser("", ("f",), parallel=True)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = parser.push(f"<think>I could write {call}.</think>\n\n{call}") + parser.flush(cut=False)
    assert events[0] == Reasoning(f"I could write {call}.")
    assert isinstance(events[1], CallStart)
    assert len(events) == 3


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("chatml", "", ""),
        ("gemma3", "", ""),
        ("llama2", "", ""),
        ("qwen3", "", "think"),
        ("hermes-tools", "hermes", "think"),
        ("llama3-tools", "llama3_json", ""),
        ("mistral-tools", "mistral", ""),
    ],
)
def test_formats_are_detected_by_the_template(name: str, tools: str, reasoning: str) -> None:
    source = next(path for path in TEMPLATES if path.stem == name).read_text()
    assert detect(source) == OutputFormat(tools, reasoning)


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        ("{{ tools }} within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=f>\n", ""),
        ("<tool_call>f<arg_key>", ""),
        ("{{ '<|python_tag|>' + x }}", "llama3_json"),
        ("""{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}""", "llama3_json"),
        ("[func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<|python_start|><|python_tag|>", "pythonic"),
        ("[TOOL_CALLS]", "mistral"),
        ("{{ tools }}", ""),
    ],
)
def test_formats_of_calls_are_detected_by_what_templates_have(template: str, tools: str) -> None:
    assert detect(template).tools == tools
    assert detect(template, "none").tools == ""
    assert detect(template, "json").tools == "json"


def test_a_setting_has_precedence_over_the_template() -> None:
    assert detect("<think>", "auto", "none") == OutputFormat()
    assert detect("", "auto", "mistral") == OutputFormat("", "mistral")
    assert detect("[THINK]").reasoning == "mistral"
