import io
import subprocess
import sys

import pytest
from rich.console import Console

from cpd.common.logs import ACCESS_LOGGER
from deploy.console import StartProgress, is_severe, message_of, print_log, usage_hint
from deploy.process import ProcessState


def state(*lines: str, pid: int | None = 1) -> ProcessState:
    return ProcessState("here", pid, starts=1, error=None, exit_code=None, lines=list(lines), next_line=len(lines))


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_of_our_processes_are_understood(form: str) -> None:
    program = (
        "import logging; from cpd.common.logs import setup_logging; setup_logging('info', 'FORM', 'combined-0');"
        "log = logging.getLogger('worker.loading'); log.info('weights: %d %%', 40); log.warning('slow')"
    )
    command = [sys.executable, "-c", program.replace("FORM", form)]
    output = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    info, warning = output.splitlines()
    assert (message_of(info), is_severe(info)) == ("weights: 40 %", False)
    assert (message_of(warning), is_severe(warning)) == ("slow", True)
    assert is_severe("Traceback (most recent call last):")


def test_progress_shows_what_each_process_does_and_warnings_above() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    with StartProgress(console, ["combined-0", "prefill-0", "router-0"]) as progress:
        progress.show("combined-0", state("2026-01-01 00:00:00,000 I combined-0 worker: weights: 40 %"), ready=False)
        progress.show("prefill-0", None, ready=False)
        progress.show("router-0", state("2026-01-01 00:00:00,000 W router-0 router: [odd] template"), ready=True)
    shown = output.getvalue()
    assert "W router-0 router: [odd] template" in shown
    last = [line for line in shown.splitlines() if "-0" in line][-3:]
    assert "weights: 40 %" in last[0]
    assert "starting" in last[1]
    assert "ready" in last[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_shows_no_access_lines_and_a_file_all(terminal: bool) -> None:
    call, summary, trace = (
        f"2026-01-01 00:00:00,000 I router-0 {ACCESS_LOGGER}: call status=200",
        "2026-01-01 00:00:00,000 I router-0 router.summary: last 10 s calls=1",
        "Traceback (most recent call last):",
    )
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, color_system=None)
    print_log(console, f"{call}\n{summary}\n{trace}\n{call}")
    print_log(console, call)
    shown = [summary, trace] if terminal else [call, summary, trace, call, call]
    assert output.getvalue().splitlines() == shown


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_hint_can_be_pasted(needs_key: bool) -> None:
    hint = usage_hint("http://127.0.0.1:8000", ["tiny", "small"], needs_key, "Stop: Ctrl-C")
    assert hint.startswith("Serving tiny, small at")
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in hint
    assert '"model": "tiny"' in hint
    assert "Browser: http://127.0.0.1:8000 " in hint
    assert ("authorization" in hint) == needs_key
