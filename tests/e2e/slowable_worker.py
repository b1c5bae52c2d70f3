"""`python -m tests.e2e.slowable_worker FLAGS…`: a combined worker on a CPU that SIGUSR1 slows down to half.

It computes for real, but each step lasts at least as long as on a device with the step times below, so that several of
them on a small machine don't disturb each other. After SIGUSR1 all steps last twice as long, after SIGUSR2 as before.
The worker measures its profile and its steps with these times, as if they were the device's.
"""

import signal
import time
from collections.abc import Callable

import typer

from cpd.common.options import command
from cpd.common.settings import WorkerSettings
from decode_worker.__main__ import run
from engine.batch import Batch
from engine.execution.cpu import lanes
from engine.execution.executor import StepResult

STEP_MS, SEQ_MS, TOKEN_MS = 20.0, 0.25, 0.05
"""Duration of a step: a part that is fixed, one for each sequence, and one for each token of a prompt."""


class Slowdown:
    """Makes steps last longer."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._run = lanes._run

    def run(self, compute: lanes.Compute, threads: int | None, batch: Batch) -> StepResult:
        """Computes a step, and returns when it has lasted long enough."""
        result = self._run(compute, threads, batch)
        sequences = len(batch.context_lens)
        ms = STEP_MS + SEQ_MS * sequences + TOKEN_MS * (len(batch.token_ids) - sequences)
        end_s = result.start_s + self.factor * ms / 1e3
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result._replace(ms=(time.perf_counter() - result.start_s) * 1e3)

    def set(self, factor: float) -> Callable[..., None]:
        """Makes a signal handler that sets the factor."""

        def handler(number: int, frame: object) -> None:
            self.factor = factor

        return handler


if __name__ == "__main__":
    slowdown = Slowdown()
    lanes._run = slowdown.run
    signal.signal(signal.SIGUSR1, slowdown.set(2.0))
    signal.signal(signal.SIGUSR2, slowdown.set(1.0))
    typer.run(command(WorkerSettings, run))
