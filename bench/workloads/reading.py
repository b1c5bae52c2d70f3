"""Reading the files that workloads are made from: what cannot be read is named by file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from bench.errors import BenchError

Model = TypeVar("Model", bound=BaseModel)


def read(path: Path) -> bytes:
    """The whole file.

    Raises:
        BenchError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error


def lines(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """The JSON value of each line that is not empty, and where it stands (`path:line`).

    Raises:
        BenchError: A line is no JSON.
    """
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parse(where, line)


def parse(where: str, data: bytes) -> Any:
    """A JSON value.

    Raises:
        BenchError: It is none; the message begins with `where`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BenchError(f"{where}: this is no JSON: {error}") from error


def validate(where: str, model: type[Model], value: Any) -> Model:
    """The value as an instance of `model`.

    Raises:
        BenchError: It has another shape; the message begins with `where` and names the field.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BenchError(f"{where}: {field + ': ' if field else ''}{first['msg']}") from error
