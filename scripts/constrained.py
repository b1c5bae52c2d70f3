"""An engine on the calling thread whose outputs follow grammars, for measurements of these alone."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from cpd.common.blocks import BLOCK_SIZE, extend_hashes
from cpd.grammar.compiler import CompiledGrammar, Vocabulary
from cpd.grammar.constraint import TokenConstraint
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel
from engine.engine import Engine
from engine.execution.runner import TorchRunner
from engine.profile.labels import profile_labels
from engine.profile.rough import measure_rough_profile
from engine.types import Finish, Request, SamplingParams
from scripts.engine_driver import ROOT

_PROMPT = range(20, 52)
_KV_BYTES = 512 << 20


@dataclass(slots=True)
class Document:
    """An output.

    Attributes:
        error: Why it failed; empty if it did not.
    """

    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""


class ConstrainedEngine:
    """An engine with a checkpoint's vocabulary.

    Args:
        streams: Outputs at a time.
        max_len: Tokens of the longest prompt with its output.
    """

    def __init__(self, checkpoint: Path, *, streams: int, max_len: int) -> None:
        runner = TorchRunner(
            checkpoint, dtype="auto", device="cpu", kv_bytes=_KV_BYTES, max_model_len=max_len, lanes=False
        )
        labels = profile_labels(checkpoint, runner.dtype, runner.pool.device)
        profile = measure_rough_profile(runner, runner.num_pages * BLOCK_SIZE, **labels)
        self.vocabulary = Vocabulary.of_checkpoint(checkpoint, runner.config.vocab_size)
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._streams = streams
        self._engine = Engine(
            runner,
            max_model_len=runner.config.max_model_len,
            colocation=Colocation(PerfModel(profile)),
            max_num_seqs=streams,
            max_queue_tokens=1 << 30,
        )

    def text(self, document: Document) -> str:
        """The text of an output."""
        return str(self.tokenizer.decode(document.token_ids, skip_special_tokens=True))

    def run(self, grammars: Sequence[CompiledGrammar | None], max_tokens: int) -> list[Document]:
        """Returns an output for each grammar, at temperature 1; each has its index as its seed."""
        documents: list[Document] = [Document() for _ in grammars]
        running, waiting = set[int](), iter(range(len(grammars)))
        while True:
            while len(running) < self._streams and (index := next(waiting, None)) is not None:
                self._engine.add(self._request(index, grammars[index], max_tokens))
                running.add(index)
            if not running:
                return documents
            step = self._engine.step()
            for output in step.outputs:
                document = documents[int(output.request_id)]
                document.token_ids += output.token_ids
                document.finish = output.finish
                if output.finish is not None:
                    running.remove(int(output.request_id))
            for name, error in step.failed:
                documents[int(name)].error = error
                running.remove(int(name))

    def _request(self, index: int, grammar: CompiledGrammar | None, max_tokens: int) -> Request:
        prompt = list(_PROMPT)
        ends = frozenset(self.vocabulary.eos_ids) if grammar is not None else frozenset()
        params = SamplingParams(seed=index, max_tokens=max_tokens, stop_token_ids=ends)
        constraint = None if grammar is None else grammar.constraint(ends)
        hashes = extend_hashes(ROOT, prompt)
        return Request(str(index), prompt, len(prompt), params, ROOT, hashes, constraint=constraint)


@contextmanager
def timed(names: Sequence[str]) -> Iterator[Mapping[str, list[float]]]:
    """Times the calls of methods of all constraints, in ms, while the context is open."""
    ms: dict[str, list[float]] = {name: [] for name in names}

    def wrapped(name: str) -> Callable[..., Any]:
        method = getattr(TokenConstraint, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                ms[name].append(1e3 * (time.perf_counter() - start_s))

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(TokenConstraint, name, wrapped(name)))
        yield ms
