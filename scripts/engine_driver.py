"""Drives an engine on the calling thread, as a worker does but without HTTP, to measure the engine alone."""

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
    """Sets the interpreter up as in a worker. Otherwise a step would wait 5 ms while another lane's thread has the
    interpreter, and some steps for the garbage collector."""
    switch_threads_often()
    collect_garbage_rarely()


class EngineDriver:
    """An engine that the calling thread steps.

    Args:
        runner: Its executor. Drivers may share one if they never have work at the same time.
        colocation: How prompts run beside decodes.
        max_len: Tokens of the longest sequence.
        max_num_seqs: Most sequences that run at the same time.
        host: Host memory for evicted blocks.
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
        self._engine.set_work_callback(self._woken.set)
        self._added = 0

    def add(self, token_ids: Sequence[int], max_tokens: int) -> str:
        """Queues a prompt for `max_tokens` greedy tokens. Returns the request's id."""
        self._added += 1
        name = str(self._added)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        tokens = list(token_ids)
        self._engine.add(Request(name, tokens, len(tokens), params, ROOT, extend_hashes(ROOT, tokens)))
        return name

    @property
    def host_blocks(self) -> dict[str, int]:
        """Counts of what happened to evicted blocks."""
        return dict(self._engine.stats().host.blocks)

    def step(self) -> list[Output]:
        """Takes a step and returns its outputs. Waits for the prefill lane or for copies if there is no other work."""
        if not self._engine.has_work:
            self._woken.wait()
        self._woken.clear()
        return self._engine.step().outputs

    def abort(self, name: str) -> None:
        """Ends a request."""
        self._engine.abort(name)

    def finish(self) -> None:
        """Steps until the prefill lane has released all pages. No request may be left."""
        while self._engine.has_work or self._engine.stats().pages.used:
            self.step()
