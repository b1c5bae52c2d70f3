"""Command-line flags from settings: each field of a settings class becomes one typer option."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import ByteSize

from cpd.common.errors import CPDError
from cpd.common.settings import Settings, section_of

S = TypeVar("S", bound=Settings)


def command(settings: type[S], run: Callable[[S], None]) -> Callable[..., None]:
    """Returns a typer command with a flag for each field of `settings`, which calls `run` with the merged settings.

    If `run` raises a CPDError, the command prints it as one sentence and exits with code 1.
    """

    def call(config: Path | None = None, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        with clean_exit():
            run(settings.load(given, config))

    config_option = typer.Option("--config", help="YAML file with any of these settings.")
    parameters = [
        _parameter("config", Annotated[Path | None, config_option]),
        *(_parameter(name, _annotation(settings, name)) for name in settings.model_fields),
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = run.__doc__
    return call


class clean_exit:  # noqa: N801 - reads as a statement
    """Turns a CPDError into one line on stderr and exit code 1."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CPDError):
            sys.stderr.write(f"error: {error}\n")
            raise typer.Exit(1) from error


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(settings: type[Settings], name: str) -> Any:
    field = settings.model_fields[name]
    value = field.get_default(call_default_factory=True)
    shown = value.human_readable() if isinstance(value, ByteSize) else getattr(value, "name", str(value))
    default = f" [default: {shown}]" if value or isinstance(value, int | float) else ""
    env = f" [env: {settings.model_config['env_prefix']}{name.upper()}]"
    help_text = f"{field.description}{default}{env}"
    flag = "--" + name.replace("_", "-")
    if isinstance(field.json_schema_extra, dict):
        flag = str(field.json_schema_extra["flag"])
    kind: Any = _without_none(field.annotation)
    if get_origin(kind) is Literal:
        help_text = f"{'|'.join(filter(None, get_args(kind)))}. {help_text}"
    if kind is bool:
        flag += "/--no-" + flag.removeprefix("--")
    base = {int: int, float: float, bool: bool}.get(kind, str)
    if get_origin(kind) is list and section_of(settings, name) is None:
        return Annotated[list[str] | None, typer.Option(flag, help=help_text)]
    return Annotated[base | None, typer.Option(flag, help=help_text)]


def _without_none(kind: Any) -> Any:
    """Returns X for `X | None`, and `str` for other unions."""
    if get_origin(kind) in (UnionType, Union):
        parts = [part for part in get_args(kind) if part is not NoneType]
        return parts[0] if len(parts) == 1 else str
    return kind
