"""Lanes on a CPU: shares of its cores.

| lanes                          | compute on                       |
| --- | --- |
| full and decode, of all splits | the engine's thread, in `launch` |
| prefill, of all splits         | one other thread                 |

Each of the two threads has its own workspaces, and a team of kernel threads for each number of cores. Threads are not
pinned to cores: the system moves them when another process uses theirs.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from cpd.common.errors import ConfigError
from engine.batch import Batch, Sampled
from engine.execution.executor import Split, StepResult

Compute = Callable[[Batch], list[Sampled]]
"""Computes a step on the calling thread, and returns its tokens."""

_DECODE_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)


class CallerLane:
    """A lane that computes in `launch`, on the calling thread. See `engine.execution.executor.Lane`.

    Args:
        compute: Can be shared by lanes that never run at the same time.
        threads: Threads of the kernels; None leaves their number unchanged.
        share: Share of the device.
    """

    overlaps = False

    def __init__(self, compute: Compute, threads: int | None = None, share: float = 1.0) -> None:
        self.share = share
        self._compute = compute
        self._threads = threads
        self._ran: StepResult | None = None

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        self._ran = _run(self._compute, self._threads, batch)
        if on_done is not None:
            on_done()

    def done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        ran, self._ran = self._ran, None
        assert ran is not None, "no step was launched"
        return ran


class ThreadLane:
    """A lane that computes on the only thread of `executor`, and can queue a second step. Other arguments as in
    `CallerLane`. See `engine.execution.executor.Lane`."""

    overlaps = False

    def __init__(self, executor: ThreadPoolExecutor, compute: Compute, threads: int | None, share: float) -> None:
        self.share = share
        self._executor = executor
        self._compute = compute
        self._threads = threads
        self._launched: deque[Future[StepResult]] = deque()

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        assert len(self._launched) < 2, "two steps are not collected yet"
        step = self._executor.submit(_run, self._compute, self._threads, batch)
        self._launched.append(step)
        if on_done is not None:
            step.add_done_callback(lambda _: on_done())

    def done(self) -> bool:
        return bool(self._launched) and self._launched[0].done()

    def collect(self) -> StepResult:
        assert self._launched, "no step was launched"
        return self._launched.popleft().result()


def make_splits(compute: Compute, compute_prefill: Compute, cores: int) -> list[Split]:
    """Makes a few splits of the cores; none if there is only one core.

    Args:
        compute: Computes decodes, on the caller's thread.
        compute_prefill: Computes prefills on another thread; it shares no state with `compute` that a step changes.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefill-lane")
    return [
        Split(
            prefill=ThreadLane(executor, compute_prefill, cores - threads, 1 - threads / cores),
            decode=CallerLane(compute, threads, threads / cores),
        )
        for threads in sorted({max(1, round(share * cores)) for share in _DECODE_SHARES})
        if threads < cores
    ]


def use_threads(count: int) -> None:
    """Sets the number of threads for this thread's parallel work.

    Raises:
        ConfigError: torch refuses.
    """
    # A thread that never asks for its count can inherit another thread's later: so ask first.
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
        if torch.get_num_threads() != count:
            raise ConfigError(f"torch refuses {count} threads; is OMP_NUM_THREADS or OMP_THREAD_LIMIT set?")


def own_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def core_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Returns a container's CPU limit in cores; None if it has none.

    Args:
        cgroup: The container's own folder. https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _run(compute: Compute, threads: int | None, batch: Batch) -> StepResult:
    if threads is not None:
        use_threads(threads)
    start_s = time.perf_counter()
    sampled = compute(batch)
    return StepResult(sampled, start_s, 1e3 * (time.perf_counter() - start_s))
