"""The grammars that one model's outputs follow: those that a request's fields ask for, and those of tool calls."""

from collections.abc import Sequence
from typing import Any

from cpd.grammar.grammar import Grammar, GrammarError, json_schema
from cpd.grammar.lark import without_comments
from router.api.schemas import ChatRequest, GenerateRequest
from router.api.structured import GrammarChecker, refusal
from router.dispatch.workers import Workers
from router.errors import invalid
from router.text.parsers.call_grammar import CallRules
from router.text.parsers.output import OutputFormat
from router.text.text_files import TextFiles

_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_ANY_ARGUMENTS = {"type": "object"}


class OutputGrammars:
    """Makes grammars and checks them.

    Args:
        output_format: How the model writes reasoning and tool calls.
    """

    def __init__(self, text_files: TextFiles, workers: Workers, output_format: OutputFormat) -> None:
        self._text_files = text_files
        self._workers = workers
        self._output_format = output_format
        self._checker = GrammarChecker(text_files.tokenizer.threads)

    async def asked(
        self, request: GenerateRequest, found: tuple[str, Grammar] | None, tenant: bytes
    ) -> tuple[str, Grammar] | None:
        """Returns the field that constrains a request's answer, and its grammar, checked.

        None if there is none, or no answer: then `response_format` means nothing.

        Args:
            found: What `grammar_of` returned.

        Raises:
            ApiError: The grammar can't be used.
        """
        if found is None:
            return None
        param, grammar = found
        if isinstance(request, ChatRequest) and request.forces_calls:
            if param.startswith("response_format"):
                return None
            raise invalid(param, f"'{param}' can't constrain an output that 'tool_choice' makes tool calls.")
        self._check_can_be_followed(param, request)
        await self._checker.check(param, grammar, tenant)
        return found

    def behind_reasoning(self, param: str, grammar: Grammar, prompt: str) -> Grammar | None:
        """Returns the grammar of a chat's output that reasons before its answer; None if it does not.

        Args:
            param: The field that asked for the grammar of the answer.
            prompt: The end of the prompt's text.

        Raises:
            ApiError: The grammar is too large.
        """
        token_id = self._text_files.tokenizer.token_id
        try:
            return self._output_format.behind_reasoning(prompt, grammar, token_id)
        except GrammarError as error:
            raise refusal(param, str(error)) from None

    def of_calls(
        self, request: ChatRequest, asked: tuple[str, Grammar] | None, prompt: str
    ) -> list[tuple[str, Grammar]]:
        """Returns the grammar of an output whose tool calls must come, or follow their schemas, or stand for an answer.

        Args:
            asked: The field that constrains the answer, and its grammar.
            prompt: The end of the prompt's text.

        Returns:
            The grammars to check, with the fields that they are from. The last one is the output's. Empty if nothing
            constrains calls, or the answer's grammar leaves no room for them.

        Raises:
            ApiError: A grammar can't be used, or the calls of this model can't be told from its text.
        """
        strict = next((index for index, tool in enumerate(request.offered_tools) if tool.function.strict), None)
        if asked is None and not request.forces_calls and strict is None:
            return []
        if asked is not None and not (request.offered_tools and asked[0].startswith("response_format")):
            return []
        param = "tool_choice" if request.forces_calls else f"tools[{strict}].function.strict"
        if request.ignore_eos:
            raise invalid("ignore_eos", f"'ignore_eos' can't be true with '{param}': the output ends where that ends.")
        self._check_can_be_followed(param, request)
        token_id, many = self._text_files.tokenizer.token_id, request.parallel_tool_calls and not request.chosen_tool
        schemas, checks = _schemas(request)
        rules, output = CallRules(schemas, many, token_id), self._output_format
        try:
            if request.forces_calls:
                grammar: Grammar | None = output.forced_calls(prompt, rules)
            elif asked is not None:
                grammar = output.answer_or_calls(prompt, asked[1], rules)
            else:
                grammar = output.text_with_calls(rules)
        except GrammarError as error:
            raise refusal("tools", str(error)) from None
        if grammar is not None:
            return [*checks, ("tools", grammar)]
        if asked is not None:
            return []
        reason = "the calls of this model have no mark of their own; it is honoured if 'tool_choice' forces calls"
        raise refusal(param, reason, code="unsupported_parameter")

    async def checked(self, grammars: Sequence[tuple[str, Grammar]], tenant: bytes) -> Grammar | None:
        """Checks what `of_calls` returned. Returns the output's grammar; None if there is none.

        Raises:
            ApiError: A grammar can't be used.
        """
        for param, grammar in grammars:
            await self._checker.check(param, grammar, tenant)
        return grammars[-1][1] if grammars else None

    def _check_can_be_followed(self, param: str, request: GenerateRequest) -> None:
        """Raises ApiError if no worker could follow a grammar, or an output could not end."""
        if not (self._text_files.eos_ids or request.stop_token_ids):
            reason = "the model has no end-of-sequence token, so an output could not end; give 'stop_token_ids'"
            raise refusal(param, reason, code="unsupported_parameter")
        if self._workers.ready and not self._workers.any_with_grammars:
            raise refusal(param, "no worker of this cluster can constrain outputs", code="unsupported_parameter")


def _schemas(request: ChatRequest) -> tuple[dict[str, dict[str, Any]], list[tuple[str, Grammar]]]:
    """Returns the schemas of arguments, by the names of the tools that may be called, and the grammars to check.

    Raises:
        ApiError: A schema is too large or nested too deeply.
    """
    schemas: dict[str, dict[str, Any]] = {}
    checks: list[tuple[str, Grammar]] = []
    for index, tool in enumerate(request.offered_tools):
        name, parameters = tool.function.name, tool.function.parameters
        if request.chosen_tool not in (None, name):
            continue
        if not (request.forces_calls or tool.function.strict):
            schemas[name] = _ANY_ARGUMENTS
            continue
        schemas[name] = _NO_ARGUMENTS if parameters is None else {"type": "object"} | without_comments(parameters)
        param = f"tools[{index}].function.parameters"
        try:
            checks.append((param, json_schema(schemas[name])))
        except GrammarError as error:
            raise refusal(param, str(error)) from None
    return schemas, checks
