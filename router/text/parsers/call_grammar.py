"""Parts of the grammars of tool calls, which stand beside the parsers of their formats (`grammar` of each parser).

A grammar has its fixed parts as chat templates write them, and the arguments by the tool's JSON schema.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cpd.grammar.lark import json_document, literal, token


@dataclass(frozen=True, slots=True)
class CallRules:
    """Makes the rules of calls.

    Attributes:
        schemas: JSON schemas of the arguments, by the names of the tools that may be called.
        many: There may be several calls.
        token_id: Returns the id of a token of the tokenizer, None for a text that is no token.
    """

    schemas: Mapping[str, dict[str, Any]]
    many: bool
    token_id: Callable[[str], int | None]

    def is_token(self, marker: str) -> bool:
        """True if a marker is one token of the tokenizer."""
        return self.token_id(marker) is not None

    def marker(self, marker: str) -> str:
        """Returns the expression of a marker: its token, or its text if it has none."""
        token_id = self.token_id(marker)
        return literal(marker) if token_id is None else token(token_id)

    def several(self, rule: str, separator: str) -> str:
        """Returns the expression of one or more of a rule; of one, if there may be only one call."""
        return f"{rule} ({separator} {rule})*" if self.many else rule

    def objects(self, arguments: str) -> list[str]:
        """Returns the rules of `object`, a call as a JSON object.

        Args:
            arguments: Name of the member that has the arguments.

        Raises:
            GrammarError: A schema can't be used.
        """
        calls: dict[str, str] = {}
        for name, schema in self.schemas.items():
            before = literal('{"name": "' + name + '", "' + arguments + '": ')
            calls[name] = f"{before} {json_document(schema)} {literal('}')}"
        return self._alternatives("object", calls)

    def named(self, separator: str) -> list[str]:
        """Returns the rules of `named`, a call as its name and its arguments.

        Args:
            separator: The expression between them.

        Raises:
            GrammarError: A schema can't be used.
        """
        return self._alternatives(
            "named",
            {name: f"{literal(name)} {separator} {json_document(schema)}" for name, schema in self.schemas.items()},
        )

    @staticmethod
    def _alternatives(rule: str, calls: Mapping[str, str]) -> list[str]:
        names = [f"{rule}_{index}" for index in range(len(calls))]
        rules = [f"{name}: {call}" for name, call in zip(names, calls.values(), strict=True)]
        return [f"{rule}: {' | '.join(names)}", *rules]
