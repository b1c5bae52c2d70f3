"""Shows the progress of a run.

It shares the cores with the measuring client, so it draws only a few times a second and keeps only the latest
latencies.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bench.record import Failure, Record

_DRAW_EVERY_S = 0.25
_PRINT_EVERY_S = 5.0  # without a terminal
_RATE_OVER_S = 10.0
_LATEST_REQUESTS = 1000
_LATEST_GAPS = 10_000


class LiveProgress:
    """Shows a run as a live display in a terminal, else as a line every few seconds.

    A context manager; `begin` may be called again for the next run. It reads no clock: `update` gets the time.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every_s = _DRAW_EVERY_S if self._live else _PRINT_EVERY_S
        self.begin(total=None, duration_s=None)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def begin(self, total: int | None, duration_s: float | None) -> None:
        """Begins a run.

        Args:
            total: Number of sessions, if known.
            duration_s: Seconds in which sessions are sent, if limited.
        """
        self._total = total
        self._duration_s = duration_s
        self._finished = 0
        self._sessions = 0  # sessions whose first turn has ended
        self._errors: Counter[str] = Counter()
        self._ttft_ms: deque[float] = deque(maxlen=_LATEST_REQUESTS)
        self._gaps_ms: deque[float] = deque(maxlen=_LATEST_GAPS)
        self._ends: deque[tuple[float, int]] = deque([(0.0, 0)])  # (elapsed, finished by then) of the last seconds
        self._next_s = 0.0 if self._live else _PRINT_EVERY_S

    def update(self, finished: Sequence[Record], in_flight: int, elapsed_s: float) -> None:
        """Takes the progress of the run.

        Args:
            finished: Requests that ended since the last call.
            in_flight: Number of running requests.
            elapsed_s: Seconds since the run began.
        """
        for record in finished:
            self._take(record)
        if elapsed_s < self._next_s:
            return
        self._next_s = elapsed_s + self._every_s
        self._ends.append((elapsed_s, self._finished))
        while len(self._ends) > 2 and self._ends[1][0] <= elapsed_s - _RATE_OVER_S:
            self._ends.popleft()
        if self._live:
            self._live.update(self._display(in_flight, elapsed_s), refresh=True)
        else:
            self._console.print(" · ".join(self._facts(in_flight, elapsed_s)), highlight=False, soft_wrap=True)

    def _take(self, record: Record) -> None:
        if record.error == Failure.ABORTED:
            return
        self._finished += 1
        self._sessions += record.turn == 0
        if record.error:
            self._errors[record.error] += 1
            return
        self._ttft_ms.append((record.content_s[0] - record.due_s) * 1e3)
        self._gaps_ms.extend((np.diff(record.content_s[-_LATEST_GAPS - 1 :]) * 1e3).tolist())

    def _display(self, in_flight: int, elapsed_s: float) -> Table:
        share = self._share(elapsed_s)
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=60, pulse=share is None, animation_time=elapsed_s)
        facts = Text(" · ".join(self._facts(in_flight, elapsed_s)), style="red" if self._errors else "")
        display = Table.grid()
        display.add_row(bar)
        display.add_row(facts)
        return display

    def _facts(self, in_flight: int, elapsed_s: float) -> Iterable[str]:
        yield f"{elapsed_s:.0f} s"
        of_total = f"/{self._total}" if self._total else ""
        if self._finished == self._sessions:
            yield f"{self._finished}{of_total} done"
        else:
            yield f"{self._finished} done in {self._sessions}{of_total} sessions"
        yield f"{self._rate():.2f}/s"
        yield f"{in_flight} in flight"
        for name, values in (("TTFT", self._ttft_ms), ("ITL", self._gaps_ms)):
            if values:
                p50, p99 = np.percentile(values, [50, 99])
                yield f"{name} p50 {p50:.1f} p99 {p99:.1f} ms"
        if self._errors:
            yield "failed: " + ", ".join(f"{kind} {count}" for kind, count in self._errors.most_common())
        share = self._share(elapsed_s)
        if share and share < 1:
            yield f"{elapsed_s * (1 - share) / share:.0f} s left"

    def _rate(self) -> float:
        """Recently ended requests per second."""
        (from_s, before), (to_s, after) = self._ends[0], self._ends[-1]
        return (after - before) / (to_s - from_s) if to_s > from_s else 0.0

    def _share(self, elapsed_s: float) -> float | None:
        """Completed share of the run; None if its end is unknown."""
        shares = []
        if self._total:
            shares.append(self._sessions / self._total)
        if self._duration_s:
            shares.append(elapsed_s / self._duration_s)
        return min(max(shares), 1.0) if shares else None
