"""The log of each process, on standard error: lines of text for people, or JSON for a log store.

A record may have fields, which both formats show: `log.info("the worker is lost", extra=fields(request_id="r1"))` is

    2026-01-01 12:00:00,000 I router-0 router.dispatch.dispatcher: the worker is lost request_id=r1
    {"time": "2026-01-01T12:00:00.000Z", "level": "info", "process": "router-0", "logger": "router.dispatch.dispatcher",
     "message": "the worker is lost", "request_id": "r1"}
"""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

LogFormat = Literal["text", "json"]

_TEXT_LINE = re.compile(r"^\S+ \S+ (?P<level>[DIWEC]) \S+ \S+: (?P<message>.*)$")
_PLAIN = re.compile(r"[^\s\"=]+")


def setup_logging(level: str, form: LogFormat, name: str) -> None:
    """Logs to stderr, with the process's name (such as `combined-0`) in each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(name) if form == "json" else TextFormatter(name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """What a log line is about, as its `extra`. Never prompts or answers."""
    return {"fields": values}


class TextFormatter(logging.Formatter):
    """One line of text, its fields at the end, then a traceback if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        line = super().formatMessage(record)
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in _fields(record).items() if value != "")])


class JsonFormatter(logging.Formatter):
    """One JSON document a line. A traceback is in `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a process of the cluster has logged.

    Attributes:
        severe: True for warnings and errors.
    """

    message: str
    severe: bool


def parse_line(line: str) -> LogLine | None:
    """Reads a line in either format. None if it is in neither, such as a line of a traceback."""
    if match := _TEXT_LINE.match(line):
        return LogLine(match["message"], match["level"] in "WEC")
    try:
        found = orjson.loads(line)
        return LogLine(str(found["message"]), found["level"] in ("warning", "error", "critical"))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else orjson.dumps(text).decode()
