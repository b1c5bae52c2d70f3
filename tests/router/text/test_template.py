import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cpd.common.errors import CheckpointError
from router.errors import ApiError
from router.text import template
from router.text.template import ChatTemplate, read_template

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hi there"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Five?"},
    ],
    "characters that others escape": [
        {"role": "user", "content": "<b>\"x\" & 'y'</b> {{ 7 * 7 }} {% if %} 你好 🙂 \\n"}
    ],
    "white space": [{"role": "user", "content": "  \n\n padded \t\n "}],
    "empty": [{"role": "user", "content": ""}],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "assistant first": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
    "late system": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    "names": [{"role": "user", "name": "ada", "content": "a"}],
}


@pytest.fixture(scope="module")
def oracle(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_renders_what_transformers_renders(
    template: Path, chat: list[dict[str, Any]], oracle: PreTrainedTokenizerFast
) -> None:
    source = template.read_text()
    ours = ChatTemplate(source, SPECIAL)
    try:
        expected = oracle.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        with pytest.raises(ApiError, match=re.escape(f"chat template refuses these messages: {error}")):
            ours.render(chat)
    else:
        assert ours.render(chat) == expected


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather <now> & "here", 你好',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abc123xyz",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, None]}},
            },
            {"id": "abc123xy2", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "abc123xyz", "content": "sunny"},
    {"role": "tool", "tool_call_id": "abc123xy2", "content": "noon"},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("name", ["hermes-tools", "llama3-tools", "mistral-tools"])
@pytest.mark.parametrize("chat", [CHATS["turns"], CALLS], ids=["question", "calls and results"])
def test_tools_and_calls_are_what_transformers_renders(
    name: str, chat: list[dict[str, Any]], oracle: PreTrainedTokenizerFast
) -> None:
    source = next(path for path in TEMPLATES if path.stem == name).read_text()
    ours = ChatTemplate(source, SPECIAL)
    assert ours.knows("tools")
    given: list[Any] = [TOOLS, []]
    for tools in given:
        expected = oracle.apply_chat_template(
            chat, tools=tools or None, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert ours.render(chat, tools=tools) == expected
    assert TOOLS[0]["function"]["name"] in ours.render(chat, tools=TOOLS)


@pytest.mark.parametrize("name", ["chatml", "gemma3", "llama2", "qwen3"])
def test_templates_without_tools_are_recognised(name: str) -> None:
    source = next(path for path in TEMPLATES if path.stem == name).read_text()
    assert not ChatTemplate(source, SPECIAL).knows("tools")


def test_content_parts_are_passed_to_a_template_that_supports_them(oracle: PreTrainedTokenizerFast) -> None:
    source = next(path for path in TEMPLATES if path.stem == "gemma3").read_text()
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]
    chat: Any = [{"role": "user", "content": parts}]
    expected = oracle.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(source, SPECIAL).render(chat) == expected


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen2.5", "qwen3", "mistral-v3", "phi3"])
def test_content_parts_are_joined_for_a_template_that_takes_text(name: str) -> None:
    template = ChatTemplate(next(path for path in TEMPLATES if path.stem == name).read_text(), SPECIAL)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = template.render([{"role": "user", "content": "one\ntwo"}])
    assert template.render([{"role": "user", "content": parts}]) == joined


FIRST_PART_OF_SYSTEM = """{% if messages[0].role == 'system' %}
{% set system = messages[0].content if messages[0].content is string else messages[0].content[0].text %}{{ system }}|
{% set messages = messages[1:] %}{% endif %}"""
TEXT_OR_PARTS = """{% if message.content is string %}{{ message.content }}|
{% else %}{% for part in message.content %}{{ part.text }}|{% endfor %}{% endif %}"""
KINDS_OF_PARTS: dict[str, tuple[str, str]] = {
    "devstral": (
        FIRST_PART_OF_SYSTEM
        + "{% for message in messages %}{% if message.role == 'user' %}"
        + TEXT_OR_PARTS
        + "{% elif message.role == 'tool' %}{{ message.content|string }}|{% elif message.tool_calls is not defined %}"
        "{{ message.content if message.content is string else message.content[0].text }}|"
        "{% endif %}{% endfor %}",
        "system1\nsystem2|user1|user2|assistant1\nassistant2|tool1\ntool2|one|",
    ),
    "llama": (
        FIRST_PART_OF_SYSTEM
        + "{% for message in messages %}{% if message.role == 'tool' %}"
        + TEXT_OR_PARTS.replace("part.text", "{'output': part.text}|tojson")
        + "{% elif message.tool_calls is not defined %}"
        + TEXT_OR_PARTS
        + "{% endif %}{% endfor %}",
        "system1\nsystem2|user1|user2|assistant1|assistant2|tool1\ntool2|one|",
    ),
    "refuses system and tool": (
        "{% for message in messages %}{% if message.role in ('system', 'tool') and message.content is not string %}"
        "{{ raise_exception('no parts') }}{% elif message.tool_calls is not defined %}"
        + TEXT_OR_PARTS
        + "{% endif %}{% endfor %}",
        "system1\nsystem2|user1|user2|assistant1|assistant2|tool1\ntool2|one|",
    ),
    "only parts": (
        "{% for message in messages %}{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}|{% else %}{{ raise_exception('no part') }}{% endif %}"
        "{% endfor %}{% endfor %}",
        "system1|system2|user1|user2|assistant1|assistant2|tool1|tool2|one|",
    ),
}


@pytest.mark.parametrize(("source", "expected"), KINDS_OF_PARTS.values(), ids=KINDS_OF_PARTS.keys())
def test_no_content_part_is_lost_whatever_the_role(source: str, expected: str) -> None:
    def message(role: str, *texts: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text} for text in texts], **fields}

    call = CALLS[1]["tool_calls"][1]
    chat = [
        message("system", "system1", "system2"),
        message("user", "user1", "user2"),
        message("assistant", "assistant1", "assistant2"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        message("tool", "tool1", "tool2", tool_call_id=call["id"]),
        message("user", "one"),
    ]
    assert ChatTemplate(source, SPECIAL).render(chat).replace("|\n", "|") == expected


def test_a_single_content_part_is_a_text_for_a_template_that_takes_both() -> None:
    template = ChatTemplate("{% for message in messages %}" + TEXT_OR_PARTS + "{% endfor %}", SPECIAL)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content, expected in (([parts[0]], "one|\n"), (parts, "one|two|")):
        assert template.render([{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_additional_variables_reach_the_template(oracle: PreTrainedTokenizerFast, thinking: bool) -> None:
    source = next(path for path in TEMPLATES if path.stem == "qwen3").read_text()
    chat = CHATS["turns"]
    expected = oracle.apply_chat_template(
        chat, chat_template=source, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    assert ChatTemplate(source, SPECIAL).render(chat, {"enable_thinking": thinking}) == expected


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "bos_token"])
def test_a_templates_own_variables_can_not_be_set(name: str) -> None:
    with pytest.raises(ApiError, match=f"can't set '{name}'"):
        ChatTemplate("x", SPECIAL).render(CHATS["turns"], {name: "x"})


@pytest.mark.parametrize("name", ["self", "loop", "range", "raise_exception", "__class__", "", "a b"])
def test_any_name_of_a_variable_is_harmless(name: str) -> None:
    assert ChatTemplate("{{ messages[0].content }}", SPECIAL).render(CHATS["turns"], {name: "x"}) == "One?"


def test_the_developer_role_becomes_system_for_a_template_without_it() -> None:
    template = ChatTemplate(next(path for path in TEMPLATES if path.stem == "chatml").read_text(), SPECIAL)
    question = {"role": "user", "content": "Hi"}
    as_system = template.render([{"role": "system", "content": "Be brief."}, question])
    assert template.render([{"role": "developer", "content": "Be brief."}, question]) == as_system
    knowing = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}{# developer #}", {})
    assert knowing.render([{"role": "developer", "content": "x"}]) == "developer"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_can_not_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(ApiError, match="refuses"):
        ChatTemplate(attack, {}).render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_a_broken_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="syntax error in line 2"):
        ChatTemplate("\n{% for x in %}", {})


def test_an_error_in_a_template_refuses_the_messages() -> None:
    with pytest.raises(ApiError, match="refuses"):
        ChatTemplate("{{ 1 + messages[0].content }}", {}).render([{"role": "user", "content": "x"}])


TEN = "{% for i in range(10) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        TEN * 12 + "x" + "{% endfor %}" * 12,
    ],
)
def test_a_template_that_takes_too_long_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ChatTemplate("{% if messages[0].content == 'One?' %}" + source + "{% endif %}", SPECIAL)
    monkeypatch.setattr(template, "RENDER_S", 0.05)
    with pytest.raises(ApiError, match=r"takes longer than 0\.05 s"):
        ours.render(CHATS["turns"])
    assert ours.render(CHATS["empty"]) == ""


def test_a_template_that_calls_itself_for_ever_is_refused() -> None:
    ours = ChatTemplate("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", SPECIAL)
    with pytest.raises(ApiError, match="recursion"):
        ours.render(CHATS["empty"])


class TestReadTemplate:
    def test_the_file_has_precedence(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("file")
        assert read_template(tmp_path, {"chat_template": "config"}) == "file"

    def test_the_configuration_can_contain_it(self, tmp_path: Path) -> None:
        assert read_template(tmp_path, {"chat_template": "config"}) == "config"

    def test_the_default_of_several_is_taken(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        assert read_template(tmp_path, {"chat_template": named}) == "d"
        assert read_template(tmp_path, {"chat_template": named}, for_tools=True) == "t"
        assert read_template(tmp_path, {"chat_template": named[1:]}, for_tools=True) == "d"
        assert read_template(tmp_path, {"chat_template": "one"}, for_tools=True) == "one"
        assert read_template(tmp_path, json.loads('{"chat_template": {"default": "d", "rag": "r"}}')) == "d"

    def test_several_without_a_default_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="none of them is named 'default'"):
            read_template(tmp_path, {"chat_template": [{"name": "rag", "template": "r"}]})

    def test_a_base_model_has_none(self, tmp_path: Path) -> None:
        assert read_template(tmp_path, {}) is None
