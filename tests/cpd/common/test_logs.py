import json
import logging
import sys

import pytest

from cpd.common.logs import JsonFormatter, LogLine, TextFormatter, fields, parse_line


def record(message: str, level: int = logging.INFO, **about: object) -> logging.LogRecord:
    made = logging.LogRecord("router.access", level, "", 0, message, (), None)
    made.__dict__.update(fields(**about) if about else {})
    return made


def test_text_shows_the_fields_behind_the_message() -> None:
    line = TextFormatter("router-0").format(record("call", request_id="r1", tenant="", reason="it is\nlate", ms=1.5))
    assert line.endswith(' I router-0 router.access: call request_id=r1 reason="it is\\nlate" ms=1.5')


def test_json_has_the_fields_beside_the_message() -> None:
    line = json.loads(JsonFormatter("router-0").format(record("call", request_id="r1", ms=1.5)))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "process": "router-0",
        "logger": "router.access",
        "message": "call",
        "request_id": "r1",
        "ms": 1.5,
    }


def test_a_traceback_is_part_of_the_json_line() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        made = record("failed", logging.ERROR)
        made.exc_info = sys.exc_info()
    line = JsonFormatter("router-0").format(made)
    assert "\n" not in line
    assert "ValueError: odd" in json.loads(line)["exception"]


@pytest.mark.parametrize("formatter", [TextFormatter("a"), JsonFormatter("a")])
def test_lines_of_both_formats_can_be_read_again(formatter: logging.Formatter) -> None:
    assert parse_line(formatter.format(record("loading 40 %"))) == LogLine("loading 40 %", severe=False)
    assert parse_line(formatter.format(record("slow", logging.WARNING))) == LogLine("slow", severe=True)


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "{", "{}", "[1]", "7"])
def test_other_lines_are_none_of_ours(line: str) -> None:
    assert parse_line(line) is None
