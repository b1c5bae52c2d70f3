import json
import logging
import select
import subprocess
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
    for level, severe in ((logging.INFO, False), (logging.WARNING, True)):
        line = formatter.format(record("loading: 40 %", level))
        assert parse_line(line) == LogLine("router.access", "loading: 40 %", severe)


@pytest.mark.parametrize("odd", ["\x1b[2J", "a\nb", "\x9b2J", "\u202e", "\udcff"])
@pytest.mark.parametrize("formatter", [TextFormatter("a"), JsonFormatter("a")])
def test_no_text_breaks_a_line_or_controls_a_terminal(formatter: logging.Formatter, odd: str) -> None:
    line = formatter.format(record(f"refused: {odd}", reason=odd))
    assert len(line.splitlines()) == 1
    assert not set(line) & set("\x1b\x9b\udcff")
    assert line.encode()
    parsed = parse_line(line)
    assert parsed is not None
    assert parsed.message.startswith("refused: ")


def test_text_shows_control_characters_escaped() -> None:
    line = TextFormatter("a").format(record("refused \x1b[2J", reason="\u202e"))
    assert line.endswith(r"refused \x1b[2J reason=\u202e")


def test_json_shows_what_its_library_refuses() -> None:
    line = json.loads(JsonFormatter("a").format(record("odd", number=1 << 70, text="\udcff", other={1})))
    assert (line["number"], line["text"], line["other"]) == (1 << 70, "?", "{1}")


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "{", "{}", "[1]", "7"])
def test_other_lines_are_none_of_ours(line: str) -> None:
    assert parse_line(line) is None


def test_a_reader_that_stalls_stops_nobody_and_learns_what_it_missed() -> None:
    program = """
import logging, sys
from cpd.common.logs import setup_logging
setup_logging("info", "text", "router-0")
log = logging.getLogger("router.access")
for number in range(2000):
    log.info("%d %s", number, "x" * 200)
print("done", flush=True)
sys.stdin.readline()
log.info("again")
"""
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], 30)
            assert ready, "the process waits for the reader of its log"
            assert process.stdout.readline() == "done\n"
            first = process.stderr.readline()
            numbers = [int(first.split()[5])]
            process.stdin.write("\n")
            process.stdin.flush()
            *rest, lost, again = process.stderr.read().splitlines()
            numbers += [int(line.split()[5]) for line in rest]
        finally:
            process.kill()
    assert numbers == list(range(len(numbers)))
    assert f" W router-0 cpd.common.logs: {2000 - len(numbers)} lines are lost" in lost
    assert again.endswith("again")
