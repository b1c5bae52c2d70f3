"""The terminal output of `cpd up`."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cpd.common.logs import ACCESS_LOGGER, parse_line
from deploy.process import ProcessState

_STATUS_WIDTH = 60


def message_of(line: str) -> str:
    """Returns the message of a log line (see `cpd.common.logs`), or the line itself if it has another form."""
    parsed = parse_line(line)
    return parsed.message if parsed else line


def is_severe(line: str) -> bool:
    """True for warnings, errors, and lines of another form, such as a traceback."""
    parsed = parse_line(line)
    return parsed is None or parsed.severe


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


def print_log(console: Console, lines: str) -> None:
    """Prints log lines of a process unchanged. A terminal gets no access lines: a busy cluster would flood it."""
    shown = [line for line in lines.split("\n") if not (console.is_terminal and _is_access(line))]
    if shown:
        console.out("\n".join(shown), style="dim", highlight=False)


def usage_hint(url: str, models: Sequence[str], needs_key: bool, stop: str) -> str:
    """Returns how to use the cluster: its URL, a curl line, the Python client, the page, and how to stop it."""
    header = " -H 'authorization: Bearer YOUR-KEY'" if needs_key else ""
    key = "YOUR-KEY" if needs_key else "none"
    return f"""\
Serving {", ".join(models)} at {url}

  curl {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "{models[0]}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64}}'

Python: OpenAI(base_url="{url}/v1", api_key="{key}")    Browser: {url}    {stop}
"""


def _is_access(line: str) -> bool:
    parsed = parse_line(line)
    return parsed is not None and parsed.logger == ACCESS_LOGGER
