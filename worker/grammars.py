"""Grammars of a worker's requests: the checkpoint's tokenizer, and what was compiled for it."""

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cpd.common.process import give_way
from cpd.grammar.compiler import CompiledGrammar, Vocabulary
from cpd.grammar.grammar import Grammar, GrammarError
from engine.types import Request

log = logging.getLogger(__name__)

MAX_COMPILED = 128
"""Number of compiled grammars that are kept, the most recently used ones."""


class Grammars:
    """Compiles grammars, one after the other on a thread that gives way, and keeps them. Use it on the event loop.

    Args:
        vocabulary: The model's tokens; None: no grammar can be followed.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, "grammars", initializer=give_way)
        self._compiled: OrderedDict[bytes, asyncio.Future[CompiledGrammar]] = OrderedDict()

    @property
    def supported(self) -> bool:
        """True if the worker can enforce grammars."""
        return self._vocabulary is not None

    async def constrain(self, request: Request) -> Request:
        """Returns a request with its constraint; the request itself if its output need not follow a grammar.

        Raises:
            GrammarError: The grammar can't be enforced.
        """
        grammar = request.params.grammar
        if grammar is None:
            return request
        compiled = await self._get(grammar)
        return replace(request, constraint=compiled.constraint(request.params.stop_token_ids))

    async def _get(self, grammar: Grammar) -> CompiledGrammar:
        key = grammar.digest
        compiling = self._compiled.get(key)
        if compiling is None:
            compiling = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            self._compiled[key] = compiling
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return await asyncio.shield(compiling)  # others may wait for it

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._vocabulary is None:
            raise GrammarError("this worker can't enforce grammars: it has no tokenizer")
        return self._vocabulary.compile(grammar)


async def load_grammars(checkpoint: Path | None, vocab_size: int) -> Grammars:
    """Loads a checkpoint's tokenizer. Call it before there is work: a large one holds the interpreter for a second.

    Args:
        vocab_size: Number of the model's logits.
    """
    if checkpoint is None:
        return Grammars(None)
    try:
        return Grammars(await asyncio.to_thread(Vocabulary.of_checkpoint, checkpoint, vocab_size))
    except GrammarError as error:
        log.warning("requests with grammars are refused: %s", error)
        return Grammars(None)
