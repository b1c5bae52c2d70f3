"""The log of each process, on standard error: lines of text for people, or JSON for a log store.

A record may have fields, which both formats show: `log.info("the worker is lost", extra=fields(request_id="r1"))` is

    2026-01-01 12:00:00,000 I router-0 router.dispatch.dispatcher: the worker is lost request_id=r1
    {"time": "2026-01-01T12:00:00.000Z", "level": "info", "process": "router-0", "logger": "router.dispatch.dispatcher",
     "message": "the worker is lost", "request_id": "r1"}
"""

import json
import logging
import re
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import orjson

from cpd.common.log_floods import FloodFilter

LogFormat = Literal["text", "json"]

ACCESS_LOGGER = "router.access"
"""The logger of the access lines, of which there is one for each call."""

_TEXT_LINE = re.compile(r"^\S+ \S+ (?P<level>[DIWEC]) \S+ (?P<logger>\S+): (?P<message>.*)$")
_PLAIN = re.compile(r"[^\s\"=]+")


def setup_logging(level: str, form: LogFormat, name: str) -> None:
    """Logs to stderr, with the process's name (such as `combined-0`) in each line."""
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter(name) if form == "json" else TextFormatter(name))
    handler.addFilter(FloodFilter(handler.handle))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells each question to another router


def fields(**values: object) -> dict[str, dict[str, object]]:
    """What a log line is about, as its `extra`. Never prompts or answers."""
    return {"fields": values}


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Drops lines, and then says how many, if their reader does not keep up. Waiting would stop the event loop."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lost = 0
        self._room = select.poll()
        self._room.register(sys.stderr.fileno(), select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._room.poll(0):
            self._lost += 1
            return
        if self._lost:
            message = f"{self._lost} lines are lost: standard error was full"
            super().emit(logging.LogRecord(__name__, logging.WARNING, "", 0, message, (), None))
            self._lost = 0
        super().emit(record)


class TextFormatter(logging.Formatter):
    """One line of text, its fields at the end, then a traceback if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        line = super().formatMessage(record)
        shown = [f"{name}={_shown(value)}" for name, value in _fields(record).items() if value != ""]
        return _printable(" ".join([line, *shown]))


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
        try:
            text = orjson.dumps(line, default=str).decode()
        except TypeError:  # an integer of more than 64 bits, or text that is not valid Unicode
            text = json.dumps(line, default=str, ensure_ascii=False).encode(errors="replace").decode()
        return text if text.isprintable() else json.dumps(json.loads(text))  # escapes all but ASCII


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a process of the cluster has logged.

    Attributes:
        logger: Name of the logger.
        severe: True for warnings and errors.
    """

    logger: str
    message: str
    severe: bool


def parse_line(line: str) -> LogLine | None:
    """Reads a line in either format. None if it is in neither, such as a line of a traceback."""
    if match := _TEXT_LINE.match(line):
        return LogLine(match["logger"], match["message"], match["level"] in "WEC")
    try:
        found = orjson.loads(line)
        severe = found["level"] in ("warning", "error", "critical")
        return LogLine(str(found["logger"]), str(found["message"]), severe)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _printable(text: str) -> str:
    """Escapes control characters, which could forge lines or control a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
