"""Structured outputs: the fields of a request that constrain its output, as a grammar.

OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's older `guided_…` fields. Grammars are checked before
a request is placed, off the event loop.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from cpd.grammar import grammar as grammars
from cpd.grammar.compiler import check
from cpd.grammar.grammar import Grammar, GrammarError
from router.errors import ApiError, invalid
from router.lru import LRU
from router.text.fair_threads import FairThreads

MAX_CHECKED = 1024
"""Number of results of checks that are kept."""

_WORK_FACTOR = 16
"""Checking a byte of a grammar takes about as long as tokenizing this many characters."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _schema_form(value: Any) -> str:
    """The form of a JSON schema. pydantic puts this name into the paths of its errors."""
    return "<object>" if isinstance(value, dict) else "<text>"


Schema = Annotated[
    Annotated[dict[str, Any], Tag("<object>")] | Annotated[str, Tag("<text>")], Discriminator(_schema_form)
]
"""A JSON schema, or its text."""


class JsonSchemaFormat(_Part):
    """The schema of a `response_format`."""

    name: str | None = Field(None, description="Accepted and ignored.")
    description: str | None = Field(None, description="Accepted and ignored.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = Field(None, description="Accepted: the output always follows the schema.")


class ResponseFormat(_Part):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`text` constrains nothing.")
    json_schema: JsonSchemaFormat | None = Field(None, description="With the type `json_schema`: the schema.")


class StructuredOutputs(_Part):
    """vLLM's way to constrain an output. Exactly one field is set."""

    json_text: Schema | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = Field(None, description="A regular expression for the whole output.")
    choice: list[str] | None = Field(None, description="The texts that the output may be.")
    grammar: str | None = Field(None, description="A grammar in the notation of Lark or GBNF.")
    json_object: bool | None = Field(None, description="True: any JSON object.")


class Fields(Protocol):
    """The fields of a request that this module reads."""

    @property
    def response_format(self) -> ResponseFormat | None: ...
    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...
    @property
    def guided_json(self) -> dict[str, Any] | str | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...
    @property
    def ignore_eos(self) -> bool: ...


def grammar_of(request: Fields) -> tuple[str, Grammar] | None:
    """Returns the field that constrains a request's output, and its grammar; None if no field does.

    Raises:
        ApiError: Several fields do, or the grammar is too large or empty.
    """
    found: dict[str, Callable[[], Grammar]] = {}
    given = request.structured_outputs
    if given is not None:
        found |= _asked(
            "structured_outputs.", given.json_text, given.regex, given.choice, given.grammar, given.json_object
        )
        if not found:
            raise invalid("structured_outputs", "'structured_outputs' must have a field that is not null.")
    found |= _asked(
        "guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar, None
    )
    response = request.response_format
    if response is not None:
        path, schema = "response_format.json_schema", response.json_schema
        if (response.type == "json_schema") != (schema is not None):
            raise invalid(path, f"'{path}' must be given exactly if the type is 'json_schema'.")
        if schema is not None:
            found[f"{path}.schema"] = lambda: grammars.json_schema(schema.json_schema)
        elif response.type == "json_object":
            found["response_format"] = _json_object
    if not found:
        return None
    param, *others = found
    if others:
        names = ", ".join(f"'{name}'" for name in found)
        raise invalid(others[0], f"Only one field may constrain the output, but there are {names}.")
    if request.ignore_eos:
        raise invalid("ignore_eos", f"'ignore_eos' can't be true with '{param}': the output ends where that ends.")
    try:
        return param, found[param]()
    except GrammarError as error:
        raise refusal(param, str(error)) from None


class GrammarChecker:
    """Checks grammars, on threads that tenants share fairly, and remembers the results."""

    def __init__(self, threads: FairThreads) -> None:
        self._threads = threads
        self._results: LRU[bytes, str] = LRU(MAX_CHECKED)

    async def check(self, param: str, grammar: Grammar, tenant: bytes) -> None:
        """Raises ApiError if workers could not compile a grammar.

        Args:
            param: The field that it came in.
        """
        key = grammar.digest
        fault = self._results.get(key)
        if fault is None:
            fault = await self._threads.run(tenant, len(grammar.text) * _WORK_FACTOR, lambda: _fault(grammar))
            self._results.put(key, fault, 1)
        if fault:
            raise refusal(param, fault)


def _asked(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    json_object: bool | None,
) -> dict[str, Callable[[], Grammar]]:
    found: dict[str, Callable[[], Grammar]] = {}
    if schema is not None:
        found[f"{prefix}json"] = lambda: grammars.json_schema(schema)
    if regex is not None:
        found[f"{prefix}regex"] = lambda: grammars.regex(regex)
    if choice is not None:
        found[f"{prefix}choice"] = lambda: grammars.choice(choice)
    if grammar is not None:
        found[f"{prefix}grammar"] = lambda: grammars.ebnf(grammar)
    if json_object:
        found[f"{prefix}json_object"] = _json_object
    return found


def _json_object() -> Grammar:
    return grammars.json_schema({"type": "object"})


def _fault(grammar: Grammar) -> str:
    """Returns what is wrong with a grammar; empty if nothing is."""
    try:
        check(grammar)
    except GrammarError as error:
        return str(error)
    return ""


def refusal(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """Returns the error of a field whose grammar can't be used."""
    return invalid(param, f"'{param}' can't be used: {reason}.", code=code)
