"""A worker's engine without a model: the fake runner of the engine's tests over memory that transports can reach."""

import threading
from collections.abc import Callable, Iterator

import numpy as np

from cpd.config import WorkerSettings
from engine.batch import Batch
from engine.engine import Engine
from kvtransfer.base import PoolMemory
from tests.engine.fakes import GARBAGE, VOCAB, FakeRunner
from worker.convert import Limits
from worker.loading import Loaded

MAX_MODEL_LEN = 1024
FINGERPRINT = b"a model that chains numbers"


class _Page:
    """One page of shared memory, read and written like a list."""

    def __init__(self, slots: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
        self._slots = slots

    def __getitem__(self, offset: int) -> int:
        return int(self._slots[offset])

    def __setitem__(self, offset: int, value: int) -> None:
        self._slots[offset] = value

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots.tolist())


class _Pages:
    def __init__(self, memory: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
        self._memory = memory

    def __getitem__(self, page: int) -> _Page:
        return _Page(self._memory[page])

    def __setitem__(self, page: int, values: list[int]) -> None:
        self._memory[page] = values


class SharedRunner(FakeRunner):
    """A FakeRunner whose pages are rows of `memory`. [num_pages, BLOCK_SIZE] int64

    Args:
        before_step: Called before each step on the engine thread; a test can hold the engine there.
    """

    def __init__(self, num_pages: int, before_step: Callable[[], None] | None = None) -> None:
        super().__init__(num_pages)
        self.memory = np.full((num_pages, 16), GARBAGE, np.int64)
        self.pages = _Pages(self.memory)  # type: ignore[assignment]
        self._before_step = before_step

    def launch(self, batch: Batch) -> None:
        if self._before_step is not None:
            self._before_step()
        super().launch(batch)


def fake_loader(
    num_pages: int = 256,
    *,
    before_step: Callable[[], None] | None = None,
    fingerprint: bytes = FINGERPRINT,
    max_model_len: int = MAX_MODEL_LEN,
) -> Callable[[WorkerSettings], Loaded]:
    """What `Worker` takes for `load`."""

    def load(settings: WorkerSettings) -> Loaded:
        runner = SharedRunner(num_pages, before_step)
        engine = Engine(
            runner,
            max_model_len=max_model_len,
            token_budget=settings.token_budget,
            max_num_seqs=settings.max_num_seqs,
            max_queue_tokens=settings.max_queue_tokens,
        )
        return Loaded(
            engine=engine,
            memory=PoolMemory(runner.memory.ctypes.data, num_pages, runner.memory[0].nbytes),
            limits=Limits(VOCAB, max_model_len),
            fingerprint=fingerprint,
            dtype="int64",
        )

    return load


class Gate:
    """Holds an engine in its step while closed; for `fake_loader(before_step=gate.wait)`."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.held = False

    def close(self) -> None:
        """The next step waits."""
        self._open.clear()

    def open(self) -> None:
        """Steps go on."""
        self._open.set()

    def wait(self) -> None:
        """What the engine thread calls."""
        self.held = not self._open.is_set()
        assert self._open.wait(20), "the gate was never opened"
        self.held = False
