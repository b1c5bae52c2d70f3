import logging
import threading

from cpd.common.log_floods import BURST, FloodFilter
from tests.waiting import DEADLINE_S


class Lines(logging.Handler):
    """Collects the lines that are logged."""

    def __init__(self, period_s: float) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.summed_up = threading.Event()
        self.addFilter(FloodFilter(self.handle, period_s))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "more like this" in self.lines[-1]:
            self.summed_up.set()


def logger(lines: Lines, name: str) -> logging.Logger:
    made = logging.Logger(name)
    made.addHandler(lines)
    return made


def test_a_flood_is_one_counted_line() -> None:
    lines = Lines(0.5)
    log = logger(lines, "flood")
    for number in range(1000):
        log.warning("request %d failed", number)
    assert lines.summed_up.wait(DEADLINE_S)
    assert lines.lines[:BURST] == [f"request {number} failed" for number in range(BURST)]
    # nearly always one line; a slow machine may need more than one period
    assert len(lines.lines) < 100
    assert "failed (and" in lines.lines[BURST]


def test_other_messages_and_lower_levels_pass() -> None:
    lines = Lines(60.0)
    log = logger(lines, "others")
    for number in range(BURST + 5):
        log.info("request %d", number)
        log.error("error %d", number)
    log.error("another error")
    assert [line for line in lines.lines if line.startswith("request")] == [f"request {n}" for n in range(BURST + 5)]
    assert [line for line in lines.lines if line.startswith("error")] == [f"error {n}" for n in range(BURST)]
    assert "another error" in lines.lines


def test_a_flood_that_goes_on_is_counted_each_period_and_forgotten_after_a_quiet_one() -> None:
    lines = Lines(0.05)
    log = logger(lines, "again")

    def warn(times: int) -> None:
        for _ in range(times):
            log.warning("again")

    warn(BURST + 2)
    assert lines.summed_up.wait(DEADLINE_S)
    assert lines.lines[BURST] == "again (and 1 more like this)"
    passed = threading.Event()
    deadline = threading.Timer(DEADLINE_S, passed.set)
    deadline.start()
    while lines.lines[-1] != "again" and not passed.wait(0.1):  # two periods: the last one was quiet
        warn(1)
    deadline.cancel()
    assert lines.lines[-1] == "again"
