"""Both parsers of an output together, and the choice of the parsers that fit a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cpd.grammar.grammar import Grammar
from cpd.grammar.lark import expression, grammar, text_without
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.events import CallArguments, CallStart, Content, Event, Reasoning
from router.text.parsers.hermes import HermesParser
from router.text.parsers.json_calls import JsonParser
from router.text.parsers.llama_json import LlamaJsonParser
from router.text.parsers.mistral import MistralParser
from router.text.parsers.pythonic import PythonicParser
from router.text.parsers.reasoning import TAGS, ReasoningParser, reasoning_rules
from router.text.parsers.tool_calls import SPACE, JsonCallParser, ToolCallParser

TOOL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "json": JsonParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
"""The parsers of tool calls, by the names that vLLM has for them where it has one."""

FORCED_PARSERS: Mapping[str, type[JsonCallParser]] = {
    "hermes": HermesParser,
    "json": JsonParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": JsonParser,
}
"""The parsers of calls that must come: a JSON schema says nothing of Python's literals, so these are plain JSON."""

TokenId = Callable[[str], int | None]
"""Returns the id of a token of the tokenizer, None for a text that is no token."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and tool calls; an empty name for one that is not parsed.

    Attributes:
        tools: A name of TOOL_PARSERS.
        reasoning: A name of TAGS.
    """

    tools: str = ""
    reasoning: str = ""

    def markers(self, *, tools: bool) -> frozenset[str]:
        """Texts that a parser looks for, with or without the request's `tools`."""
        markers = TAGS[self.reasoning] if self.reasoning else ()
        return frozenset(markers + TOOL_PARSERS[self.tools].MARKERS if tools else markers)

    def may_reason(self, prompt: str) -> bool:
        """True if an output may have reasoning: a prompt with both tags at its end says that it should not.

        Args:
            prompt: The end of the prompt's text.
        """
        return bool(self.reasoning) and not prompt.rstrip(SPACE).endswith(TAGS[self.reasoning][1])

    def reasoning_tokens(self, prompt: str, token_id: TokenId) -> tuple[int | None, int | None]:
        """Returns the tokens that begin and end the reasoning of an output.

        There is none that begins it if the prompt did, and none at all where a tag that the model writes is no token.

        Args:
            prompt: The end of the prompt's text.
        """
        begin, end = map(token_id, TAGS[self.reasoning])
        if self.begins_inside(prompt):
            return None, end
        return (None, None) if begin is None else (begin, end)

    def begins_inside(self, prompt: str) -> bool:
        """True if an output begins within its reasoning.

        Args:
            prompt: The end of the prompt's text.
        """
        return bool(self.reasoning) and prompt.rstrip(SPACE).endswith(TAGS[self.reasoning][0])

    def parser(self, prompt: str, tools: Sequence[str], *, parallel: bool, forced: bool = False) -> "OutputParser":
        """Returns a parser for one output.

        Args:
            prompt: The end of the prompt's text.
            tools: Names of the tools that the model may call.
            parallel: The model may call several.
            forced: The output follows `forced_calls`.
        """
        reasoning = None
        if self.reasoning:
            reasoning = ReasoningParser(TAGS[self.reasoning], inside=self.begins_inside(prompt))
        parsers = FORCED_PARSERS if forced else TOOL_PARSERS
        return OutputParser(reasoning, parsers[self.tools](frozenset(tools)) if tools else None, parallel=parallel)

    def forced_calls(self, prompt: str, calls: CallRules) -> Grammar:
        """Returns the grammar of outputs that are tool calls, behind the model's reasoning.

        Raises:
            GrammarError: A schema can't be used, or all of them are too large.
        """
        before, rules = self._before(prompt, calls.token_id)
        return grammar([f"start: {before} calls", *rules, *FORCED_PARSERS[self.tools].grammar(calls)])

    def answer_or_calls(self, prompt: str, answer: Grammar, calls: CallRules) -> Grammar | None:
        """Returns the grammar of outputs that are an answer or calls, behind the model's reasoning.

        None if calls don't begin with a token, or `answer` has rules of its own.

        Raises:
            GrammarError: A schema can't be used, or all of them are too large.
        """
        if not self._is_marked(calls) or (content := expression(answer)) is None:
            return None
        before, rules = self._before(prompt, calls.token_id)
        parser = FORCED_PARSERS[self.tools]
        return grammar([f"start: {before} (content | calls)", f"content: {content}", *rules, *parser.grammar(calls)])

    def text_with_calls(self, calls: CallRules) -> Grammar | None:
        """Returns the grammar of outputs that are text with or without calls; None if calls don't begin with a token.

        Raises:
            GrammarError: A schema can't be used, or all of them are too large.
        """
        if not self._is_marked(calls):
            return None
        parser = FORCED_PARSERS[self.tools]
        tags = [tag for pair in TAGS.values() for tag in pair if calls.is_token(tag)]
        return grammar(
            [
                f"start: text (calls text){'*' if calls.many else '?'}",
                f"text: ({' | '.join(['TEXT', *map(calls.marker, tags)])})*",
                f"TEXT: {text_without(parser.OPENING)}",
                *parser.grammar(calls),
            ]
        )

    def behind_reasoning(self, prompt: str, answer: Grammar, token_id: TokenId) -> Grammar | None:
        """Returns the grammar of outputs whose answer follows `answer`, behind the model's reasoning.

        None if there is no such grammar: there is no reasoning, or `answer` has rules of its own.

        Raises:
            GrammarError: It is too large.
        """
        before, rules = self._before(prompt, token_id)
        if not before or (content := expression(answer)) is None:
            return None
        return grammar([f"start: {before} content", f"content: {content}", *rules])

    def _is_marked(self, calls: CallRules) -> bool:
        """True if a token says that a call begins."""
        opening = FORCED_PARSERS[self.tools].OPENING
        return bool(opening) and calls.is_token(opening)

    def _before(self, prompt: str, token_id: TokenId) -> tuple[str, list[str]]:
        """Returns what comes before the answer or the calls as an expression, and its rules; empty for nothing.

        That is the rest of the reasoning that the prompt began, or reasoning as the model likes, if tokens mark it.
        """
        if not self.may_reason(prompt):
            return "", []
        tags = TAGS[self.reasoning]
        if self.begins_inside(prompt):
            return "reasoning", reasoning_rules(tags, token_id)
        if None in map(token_id, tags):
            return "", []
        return "reasoning?", reasoning_rules(tags, token_id, opened=False)


def detect(template: str, tools: str = "auto", reasoning: str = "auto") -> OutputFormat:
    """Returns the format of a model's outputs.

    Args:
        template: Source of its chat template.
        tools, reasoning: Names of parsers; `none`; or `auto`, which looks for what each format has in its template.
    """
    tools = _detect_tools(template) if tools == "auto" else tools
    reasoning = _detect_reasoning(template) if reasoning == "auto" else reasoning
    return OutputFormat(tools.removesuffix("none"), reasoning.removesuffix("none"))


def _detect_tools(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        # other models write parameters as XML between the same tags
        return "none" if "<function=" in template or "<arg_key>" in template else "hermes"
    if "<|python_start|>" in template or "func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters": ' in template and '{"name": ' in template):
        return "llama3_json"
    return "none"


def _detect_reasoning(template: str) -> str:
    return next((name for name, tags in TAGS.items() if tags[1] in template or tags[0] in template), "none")


class OutputParser:
    """Splits one output into reasoning, content and tool calls.

    Args:
        parallel: Without it, calls behind the first one are left out.

    Attributes:
        has_calls: There was a tool call.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, *, parallel: bool = True
    ) -> None:
        self.has_calls = False
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel

    def push(self, text: str) -> list[Event]:
        """Adds text and returns what is certain now."""
        events = self._reasoning.push(text) if self._reasoning is not None else [Content(text)]
        return self._filtered(self._with_calls(events))

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far ends within the reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    def flush(self, *, cut: bool) -> list[Event]:
        """Returns the rest, after the last text.

        Args:
            cut: The output ended at its limit, not by itself.
        """
        events = self._with_calls(self._reasoning.flush() if self._reasoning is not None else [])
        if self._tools is not None:
            events += self._tools.flush(cut=cut)
        return self._filtered(events)

    def _with_calls(self, events: Sequence[Event]) -> list[Event]:
        if self._tools is None:
            return list(events)
        parts = [self._tools.push(event.text) if isinstance(event, Content) else [event] for event in events]
        return [event for part in parts for event in part]

    def _filtered(self, events: list[Event]) -> list[Event]:
        calls = (CallStart, CallArguments)
        if not self._parallel:
            events = [event for event in events if not (isinstance(event, calls) and event.index)]
        self.has_calls = self.has_calls or any(isinstance(event, CallStart) for event in events)
        return joined(events)


def joined(events: Sequence[Event]) -> list[Event]:
    """Returns the events with adjacent ones of one kind as one."""
    result: list[Event] = []
    for event in events:
        match result[-1] if result else None, event:
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(event)
    return result
