"""Reads the files of workloads. Errors name the file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from bench.errors import BenchError

Model = TypeVar("Model", bound=BaseModel)

GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip compressed."""


def read(path: Path) -> bytes:
    """Reads a whole file.

    Raises:
        BenchError: The file cannot be read, or is compressed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    if data.startswith(GZIP):
        raise BenchError(f"{path} is compressed: unpack it with gunzip first")
    return data


def lines(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Yields the position (`path:line`) and the JSON value of each non-empty line.

    Raises:
        BenchError: A line is not JSON.
    """
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse(where, line)


def parse(where: str, data: bytes) -> Any:
    """Parses a JSON value.

    Raises:
        BenchError: It is not JSON; the message begins with `where`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BenchError(f"{where}: this is not JSON: {error}") from error


def validate(where: str, model: type[Model], value: Any) -> Model:
    """Converts a value to an instance of `model`.

    Raises:
        BenchError: The value does not fit; the message begins with `where` and names the field.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BenchError(f"{where}: {field + ': ' if field else ''}{first['msg']}") from error
