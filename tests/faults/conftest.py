"""Prints what the tests of faults have measured: for each record_property in seconds, the longest one."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    longest: dict[str, float] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, seconds in report.user_properties:
            longest[name] = max(longest.get(name, 0.0), seconds)
    if longest:
        terminalreporter.section("longest times")
        for name, seconds in longest.items():
            terminalreporter.write_line(f"{seconds:6.2f} s  {name}")
