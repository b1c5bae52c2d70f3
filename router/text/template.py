"""Renders chat templates like transformers: messages to prompt text.

Templates come with models from the internet and are untrusted code. They run in Jinja's immutable sandbox and see only
plain JSON values. A template that takes longer than RENDER_S of CPU time is stopped: it looks at the clock in each pass
of a loop and each call of a macro. A single operation, such as on a huge string, can't be stopped.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from cpd.common.errors import CheckpointError
from router.errors import invalid

Message = Mapping[str, Any]
Scalar = bool | int | float | str

_PROBES = ("content-probe-1", "content-probe-2")
_PROBE_PARTS = [{"type": "text", "text": text} for text in _PROBES]

_CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": {}}}
"""Mistral's templates take only ids of nine letters and digits."""

_ROLES = ("system", "developer", "user", "assistant", "tool")

RENDER_S = 2.0
"""Limit on the CPU time of a template, in seconds."""

_LOOKS_PER_CHECK = 64
"""Reading the clock takes as long as a pass of a short loop."""

_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    RecursionError,
)
"""Errors that a template raises on purpose, or for unexpected values."""


class ChatTemplate:
    """A model's chat template.

    Args:
        source: The Jinja source.
        special_tokens: Variables for the template, such as `bos_token`.

    Attributes:
        source: The Jinja source.

    Raises:
        CheckpointError: The source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template, self._loaded = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template has a syntax error in line {error.lineno}: {error}") from None
        self.source = source
        own: dict[str, Any] = {"messages": (), "tools": None, "documents": None, "add_generation_prompt": True}
        self._variables: Mapping[str, Any] = {**special_tokens, **own}
        self._knows_developer = "developer" in source
        self._takes_parts = frozenset(role for role in _ROLES if self._shows(role, _PROBE_PARTS, *_PROBES))
        self._needs_parts = frozenset(
            role for role in self._takes_parts if not self._shows(role, _PROBES[0], _PROBES[0])
        )

    def knows(self, variable: str) -> bool:
        """True if the template reads a variable."""
        return variable in self._loaded

    def render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Scalar] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Renders the prompt text for `messages`, up to the start of the assistant's answer.

        Args:
            kwargs: Additional variables for the template, such as Qwen3's `enable_thinking`.
            tools: The tools that the model may call, in OpenAI's format.

        Raises:
            ApiError: The template refuses these messages (such as roles in an order that the model doesn't know), or
                `kwargs` has one of the template's own variables.
        """
        if taken := self._variables.keys() & kwargs:
            raise invalid("chat_template_kwargs", f"'chat_template_kwargs' can't set '{min(taken)}'.")
        try:
            return self._render([self._adapt(message) for message in messages], kwargs, tools)
        except _REFUSALS as error:
            raise invalid("messages", f"The model's chat template refuses these messages: {error}") from None

    def _render(
        self,
        messages: Sequence[Message],
        kwargs: Mapping[str, Scalar] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        own = {"messages": messages, "tools": tools or None, _CLOCK: _Clock()}
        return self._template.render({**kwargs, **self._variables, **own})

    def _adapt(self, message: Message) -> Message:
        """Converts a message of OpenAI's API into the form that this template takes."""
        adapted = dict(message)
        if adapted["role"] == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        content = adapted["content"]
        if isinstance(content, list):
            roles = self._needs_parts if len(content) == 1 else self._takes_parts
            if adapted["role"] not in roles:
                adapted["content"] = "\n".join(part["text"] for part in content)
        return adapted

    def _shows(self, role: str, content: Any, *texts: str) -> bool:
        """True if the template renders a message's content with all of its texts, and not as a Python list or JSON."""
        try:
            rendered = self._render(_probe(role, content))
        except _REFUSALS:
            return False
        return all(text in rendered and not re.search(f"['\"]{text}", rendered) for text in texts)


def _probe(role: str, content: Any) -> list[Message]:
    """Returns a chat with this content, in an order of roles that templates accept.

    The user's content is of the same form: some templates take only lists.
    """
    user = {"role": "user", "content": "x" if isinstance(content, str) else [{"type": "text", "text": "x"}]}
    message = {"role": role, "content": content}
    match role:
        case "user":
            return [message]
        case "assistant":
            return [user, message, user]
        case "tool":
            call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
            return [user, call, message | {"tool_call_id": _CALL["id"]}]
        case _:
            return [message, user]


def read_template(model_dir: Path, tokenizer_config: Mapping[str, Any], *, for_tools: bool = False) -> str | None:
    """Returns the source of the model's default chat template; None if it has none.

    `chat_template.jinja` has precedence over `tokenizer_config.json`, which has a string or a list of named templates.

    Args:
        for_tools: The template for chats with tools. If there is none named `tool_use`, it is the default one.

    Raises:
        CheckpointError: There are several templates and none of them is the default.
    """
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        if "default" not in found:
            raise CheckpointError(f"{model_dir} has several chat templates, but none of them is named 'default'")
        found = found.get("tool_use", found["default"]) if for_tools else found["default"]
    return found if isinstance(found, str) else None


class _Generation(Extension):
    """Renders the content of `{% generation %}`, which marks the assistant's turns for training."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's `namespace`, without names through which templates could leave the sandbox."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _Namespace._check(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template can't set {name!r} in a namespace")


class _Clock:
    """Stops a template that takes too long. The time is that of the thread which creates the object and renders."""

    def __init__(self) -> None:
        self._ends = time.thread_time() + RENDER_S
        self._looks = 0

    def __call__(self) -> None:
        self._looks += 1
        if self._looks % _LOOKS_PER_CHECK == 0 and time.thread_time() > self._ends:
            raise jinja2.TemplateRuntimeError(f"it takes longer than {RENDER_S:g} s")


_CLOCK = "_clock"
"""The template's variable with its clock."""


def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compiles a template that looks at its clock. Returns also the names of the variables that it reads."""
    environment = _environment()
    tree = environment.parse(source)
    loaded = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    looping: tuple[type[nodes.For | nodes.Macro | nodes.CallBlock], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
    for node in tree.find_all(looping):
        look = nodes.ExprStmt(nodes.Call(nodes.Name(_CLOCK, "load"), [], [], None, None))
        node.body.insert(0, look.set_lineno(node.lineno).set_environment(environment))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None)), loaded


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # models were not trained on the HTML escapes of Jinja's own filter
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
