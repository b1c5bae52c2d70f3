"""The terminal output of `cpd up`."""

import re
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deploy.process import ProcessState

_LOG_LINE = re.compile(r"^\S+ \S+ (?P<level>[DIWEC]) \S+ \S+: (?P<message>.*)$")
_STATUS_WIDTH = 60


def message_of(line: str) -> str:
    """Returns the message of a log line (see `setup_logging`), or the line itself if it has another form."""
    match = _LOG_LINE.match(line)
    return match["message"] if match else line


def is_severe(line: str) -> bool:
    """True for warnings, errors, and lines of another form, such as a traceback."""
    match = _LOG_LINE.match(line)
    return match is None or match["level"] in "WEC"


class StartProgress:
    """Shows one line per process while they start."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", style="dim", markup=False),
            console=console,
        )
        self._tasks = {name: self._progress.add_task(name, total=1, status="") for name in names}

    def __enter__(self) -> "StartProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, name: str, state: ProcessState | None, ready: bool) -> None:
        """Updates the line of one process and prints its warnings above."""
        task = self._tasks[name]
        if ready:
            self._progress.update(task, completed=1, status="ready")
        elif state is None or state.pid is None:
            self._progress.update(task, completed=0, status="starting")
        elif state.lines:
            self._progress.update(task, completed=0, status=message_of(state.lines[-1])[:_STATUS_WIDTH])
        for line in state.lines if state else ():
            if is_severe(line):
                print_log(self._progress.console, line)


def print_log(console: Console, line: str) -> None:
    """Prints a log line of a process unchanged."""
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def usage_hint(url: str, model: str, needs_key: bool, stop: str) -> str:
    """Returns how to use the cluster: its URL, a curl line, the Python client, and how to stop it."""
    header = " -H 'authorization: Bearer YOUR-KEY'" if needs_key else ""
    key = "YOUR-KEY" if needs_key else "none"
    return f"""\
Serving {model} at {url}

  curl {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'

Python: OpenAI(base_url="{url}/v1", api_key="{key}")    {stop}
"""
