"""Drives an engine on the calling thread as a worker does, without HTTP: for measurements of the engine alone."""

import threading
from collections.abc import Sequence

from cpd.common.blocks import extend_hashes, hash_root
from cpd.common.process import collect_garbage_rarely, switch_threads_often
from cpd.performance.colocation import Colocation
from engine.engine import Engine
from engine.execution.executor import Executor
from engine.kv.host_tier import HostMemory
from engine.types import Output, Request, SamplingParams

ROOT = hash_root(b"bench")


def as_in_a_worker() -> None:
    """Sets this process up as a worker does. Otherwise a step would wait 5 ms for the interpreter while another lane's
    thread has it, and some would wait for garbage to be collected."""
    switch_threads_often()
    collect_garbage_rarely()


class EngineDriver:
    """An engine, and the thread that steps it.

    Args:
        runner: What it runs on. Several drivers may share one, if they never have work at the same time.
        max_len: Tokens of the longest sequence.
        max_num_seqs: Sequences that run at the same time.
        host: For evicted blocks.
    """

    def __init__(
        self,
        runner: Executor,
        colocation: Colocation,
        *,
        max_len: int,
        max_num_seqs: int,
        host: HostMemory | None = None,
    ) -> None:
        self._engine = Engine(
            runner,
            max_model_len=max_len,
            colocation=colocation,
            max_num_seqs=max_num_seqs,
            max_queue_tokens=1 << 30,
            host=host,
        )
        self._woken = threading.Event()
        self._engine.on_work(self._woken.set)
        self._added = 0

    def add(self, token_ids: Sequence[int], max_tokens: int) -> str:
        """Queues a prompt, to be answered greedily with so many tokens. Returns the request's id."""
        self._added += 1
        name = str(self._added)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        tokens = list(token_ids)
        self._engine.add(Request(name, tokens, len(tokens), params, ROOT, extend_hashes(ROOT, tokens)))
        return name

    @property
    def host_blocks(self) -> dict[str, int]:
        """What happened to evicted blocks."""
        return dict(self._engine.stats().host.blocks)

    def step(self) -> list[Output]:
        """What the next step brings. Waits for the prefill lane or for copies while there is nothing else to do."""
        if not self._engine.has_work:
            self._woken.wait()
        self._woken.clear()
        return self._engine.step().outputs

    def abort(self, name: str) -> None:
        """Ends a request."""
        self._engine.abort(name)

    def finish(self) -> None:
        """Steps until the prefill lane has let go of everything. No request may be left."""
        while self._engine.has_work or self._engine.stats().pages.used:
            self.step()
