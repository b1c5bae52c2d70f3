"""The base of what clients send: unknown fields and values of another type are errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

OTHER = "<other>"
"""The form of an object whose type is not supported."""

UNSUPPORTED = "unsupported"
"""Type of pydantic's error about such an object."""


def allow_nulls(schema: dict[str, Any]) -> None:
    """Allows null for any field of a JSON schema and entry of a mapping, even an unknown one: they are dropped."""
    schema["additionalProperties"] = {"type": "null"}
    for name in schema["properties"].keys() - schema.get("required", ()):
        field = schema["properties"][name]
        if isinstance(values := field.get("additionalProperties"), dict):
            field["additionalProperties"] = {"anyOf": [values, {"type": "null"}]}
            field.pop("maxProperties", None)  # nulls do not count
        if {"type": "null"} not in field.get("anyOf", ()):
            outer = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = outer | {"anyOf": [field, {"type": "null"}]}


def _allow_ignored(schema: dict[str, Any], kind: type["Body"]) -> None:
    """Adds the fields that are accepted without being honoured to a JSON schema."""
    allow_nulls(schema)
    for name in sorted(kind.HARMLESS - schema["properties"].keys()):
        schema["properties"][name] = {"description": "Accepted and ignored: it can't change the result."}
    for name, passing in kind.PASSING.items():
        if name in schema["properties"]:
            continue
        values = {"enum": [*passing, None]} if name != "best_of" else {"type": ["integer", "null"]}  # may also be n
        schema["properties"][name] = values | {
            "description": "Not supported: only values that have no effect are accepted."
        }


class StrictModel(BaseModel):
    """An object in a request's body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=allow_nulls)


class Body(StrictModel):
    """The body of a request.

    Class attributes:
        HARMLESS: Names of fields that are accepted and ignored: they can't change the result.
        PASSING: Fields that are refused, with the values that have no effect and are accepted.
        VERBATIM: Names of fields, at any depth, with JSON in which a null has a meaning. Others are left out.
        ENTRIES: Names of the fields with messages or parts of one, whose number is limited together with their parts.
            Only their texts may have NUL characters.
    """

    model_config = ConfigDict(json_schema_extra=_allow_ignored)

    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    PASSING: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    VERBATIM: ClassVar[frozenset[str]] = frozenset()
    ENTRIES: ClassVar[tuple[str, ...]] = ("messages",)


@dataclass(frozen=True, slots=True)
class Refused:
    """The choice of a union for objects of all other types, which are refused by the name of their type.

    Attributes:
        what: What the objects are, in the plural.
    """

    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._refuse)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"not": {}}

    def _refuse(self, value: Any) -> NoReturn:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("object_type", "Input should be an object with a 'type'")
        shown = {"what": self.what, "type": kind[:40]}
        raise PydanticCustomError(UNSUPPORTED, "{what} of the type '{type}' are not supported by this server", shown)


def by_type(*types: str, default: str = "") -> Discriminator:
    """Chooses among the forms of an object by its field `type`: `<type>` for one of `types`, else OTHER.

    Args:
        default: The type of objects without that field.
    """

    def form(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"<{kind}>" if kind in types else OTHER

    return Discriminator(form)
