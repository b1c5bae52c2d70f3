"""The base of what clients send: unknown fields and values of another type are errors."""

from typing import Any

from pydantic import BaseModel, ConfigDict


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


class StrictModel(BaseModel):
    """An object in a request's body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=allow_nulls)
