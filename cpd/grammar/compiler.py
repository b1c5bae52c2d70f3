"""Checks grammars, and compiles them for a tokenizer, with llguidance.

Both may take up to a second, and belong on a thread of their own; llguidance releases the interpreter meanwhile. It
limits its own memory and time. Two things it does not limit, and this module does: it recurses along chains of rules or
references, so it runs on a thread with a deep stack; and its time grows with the square of the number of rules.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from cpd.common.checkpoint_files import eos_ids
from cpd.common.errors import CheckpointError
from cpd.grammar.constraint import OutputTokens, TokenConstraint, describe, mask_of
from cpd.grammar.ending import Endings
from cpd.grammar.grammar import Grammar, GrammarError, GrammarKind
from cpd.grammar.lark import FORCING, JSON_OPTIONS, NOT_FORCING, expression, marker_tokens

MAX_RULES = 256
"""Limit on the rules of a grammar: that many take llguidance a second at most."""

MAX_SHORTEST = 2048
"""Limit on the tokens of an ending of the empty output."""

MAX_REPEATED = 1 << 14
"""Where a text is repeated more often, tokens are not forced: llguidance follows the only text without a limit."""

_STACK_BYTES = 512 << 20
"""Virtual memory: a chain of references that fills a grammar of the largest size takes some tens of MB of it."""

_ADVICE = {
    "Unimplemented keys": "these can't be enforced; leave them out of the schema, and check them in the answer",
    "oneOf": "use anyOf if at most one of its schemas can be valid",
    "look-around": "a regular expression can't look ahead or behind",
    "lookarounds": "a regular expression can't look ahead or behind, and has no \\b",
    "backreferences": "a regular expression has no backreferences",
    "schema too large": "it describes too many cases; use fewer anyOf and allOf",
    "too big": "use fewer rules, shorter repetitions or fewer alternatives",
}
"""What to do, by a part of llguidance's message."""

_PANIC = "PanicException"
"""A failed assertion of llguidance, such as for a token of more than 1,024 bytes. It is no Exception."""

_SETS_STACK_SIZE = threading.Lock()
"""The stack size of new threads is a setting of the whole process."""

T = TypeVar("T")


def check(grammar: Grammar) -> None:
    """Checks a grammar, without a model's tokenizer.

    Raises:
        GrammarError: It is not valid, too complex, has a feature that is not supported, or no output fits.
    """
    source = _source(grammar)
    if marker_tokens(grammar):  # a vocabulary of bytes does not have them
        message = _with_deep_stack(lambda: LLMatcher.validate_grammar(source, None, limits=_limits()))
        if message and not message.startswith("WARNING"):
            raise GrammarError(_explain(message))
        return
    matcher = _matcher(_byte_tokenizer(), source)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError("no output fits the grammar: it contradicts itself, or refers to itself without end")


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


class CompiledGrammar:
    """A grammar compiled for a vocabulary.

    Args:
        matcher: At the start of an output.
        markers: The grammar's tokens that are no text.

    Attributes:
        shortest: Number of tokens of the shortest output that was found; None if none was.
        least: Number of tokens that an output can hardly have less than.
    """

    def __init__(self, vocabulary: "Vocabulary", matcher: LLMatcher, markers: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._markers = markers
        ending = vocabulary.endings.find(matcher, markers, MAX_SHORTEST)
        self.shortest = len(ending.tokens) + 1 if ending.complete else None
        self.least = len(ending.tokens) // 2 if ending.complete else len(ending.tokens)  # there may be a shorter one

    def constraint(self, end_tokens: Collection[int]) -> TokenConstraint:
        """Returns the constraint of a new output.

        Args:
            end_tokens: The tokens that end it.

        Raises:
            GrammarError: None of them is in the vocabulary.
        """
        vocabulary = self._vocabulary
        ends = mask_of(end_tokens, vocabulary.size)
        if not ends.any():
            raise GrammarError("without an end-of-sequence token, an output can't end where its grammar ends")
        known = sorted(token for token in end_tokens if 0 <= token < vocabulary.size)
        tokens = OutputTokens(
            num_words=vocabulary.num_words,
            text=vocabulary.text & ~ends,
            ends=ends,
            end_ids=frozenset(known),
            end=next((token for token in vocabulary.eos_ids if token in known), known[0]),
            markers=self._markers,
            endings=vocabulary.endings,
            shortest=self.shortest,
            least=self.least,
        )
        return TokenConstraint(self._matcher.deep_copy(), tokens)


class Vocabulary:
    """A model's tokens, for which grammars are compiled.

    Args:
        tokenizer_json: Text of the checkpoint's tokenizer.json.
        vocab_size: Number of the model's logits. The tokenizer may have fewer or more tokens.
        eos_ids: The model's end-of-sequence tokens, which are no text.

    Attributes:
        size: Number of the model's logits.
        num_words: Number of words of a matcher's masks.
        text: The model's tokens that can be text.
        eos_ids: The end-of-sequence tokens.
        endings: Finds endings of outputs.

    Raises:
        GrammarError: Grammars can't be used with this tokenizer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        eos = [token for token in eos_ids if token < vocab_size] or None
        try:
            try:
                self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
            except ValueError:  # it has more tokens than the model
                self._tokenizer = LLTokenizer(tokenizer_json, eos_token=eos)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            raise GrammarError(f"grammars can't be used with this model's tokenizer: {error}") from None
        self.size = vocab_size
        self.num_words = (self._tokenizer.vocab_size + 31) // 32
        self.eos_ids = tuple(self._tokenizer.eos_tokens)
        self.text = mask_of(range(vocab_size), vocab_size) & ~mask_of(self.eos_ids, vocab_size)
        self.endings = Endings(self._tokenizer)

    @classmethod
    def of_checkpoint(cls, directory: Path, vocab_size: int) -> "Vocabulary":
        """Reads a checkpoint's vocabulary.

        Raises:
            GrammarError: A file can't be read, or grammars can't be used with this tokenizer.
        """
        try:
            return cls((directory / "tokenizer.json").read_text(), vocab_size, eos_ids(directory))
        except (OSError, ValueError, CheckpointError) as error:
            raise GrammarError(f"the model's tokenizer can't be read: {error}") from None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar.

        Raises:
            GrammarError: It is not valid, too complex, or has a feature that is not supported.
        """
        matcher = _matcher(self._tokenizer, _source(grammar))
        matcher.compute_bitmask()
        if matcher.is_error():  # such as a schema that refers to itself without end
            raise GrammarError(f"no output of this model fits the grammar: {describe(matcher.get_error())}")
        return CompiledGrammar(self, matcher, marker_tokens(grammar))


def _source(grammar: Grammar) -> str:
    """Returns a grammar in llguidance's own form."""
    text = grammar.text
    if _repeats_much(text) and (only := expression(grammar)):
        return LLMatcher.grammar_from_lark(f"{NOT_FORCING}\nstart: {only}")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        case GrammarKind.EBNF:
            try:
                lark = any_to_lark(text)
            except RecursionError:
                raise GrammarError("the grammar is nested too deeply") from None
            except Exception as error:
                raise GrammarError(f"the grammar can't be read: {describe(str(error))}") from None
            rules = sum(not line.lstrip().startswith(("|", "//", "%")) for line in lark.splitlines() if line.strip())
            if rules > MAX_RULES:
                raise GrammarError(f"the grammar has {rules} rules; at most {MAX_RULES} are allowed")
            if not lark.startswith(FORCING) or _repeats_much(text):
                lark = f"{lark}\n{NOT_FORCING}"  # the last one counts, and clients may write others anywhere
            return LLMatcher.grammar_from_lark(lark)


def _repeats_much(text: str) -> bool:
    """True if a regular expression, perhaps in a JSON document, may repeat a text more than MAX_REPEATED times."""
    parts = (re.findall(r"\{(\d{1,9})", part) for part in re.split(r'["\n]', text))
    return any(math.prod(map(int, counts)) > MAX_REPEATED for counts in parts)


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compiles a grammar in llguidance's own form.

    Raises:
        GrammarError: It is not valid, too complex, or has a feature that is not supported.
    """
    matcher = _with_deep_stack(lambda: LLMatcher(tokenizer, source, log_level=0, limits=_limits()))
    if matcher.is_error():
        raise GrammarError(_explain(matcher.get_error()))
    return matcher


def _limits() -> LLParserLimits:
    return LLParserLimits(verbose_errors=False)  # the default ones; an error does not quote the output


def _explain(message: str) -> str:
    advice = next((advice for part, advice in _ADVICE.items() if part in message), "")
    lines = [line for line in message.splitlines() if line.startswith("error: ")]  # of a regular expression
    detail = f" ({lines[0].removeprefix('error: ')})" if lines else ""
    return f"{describe(message)}{detail}" + (f": {advice}" if advice else "")


def _with_deep_stack(call: Callable[[], T]) -> T:
    """Returns what `call` returns on a thread with a deep stack."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    with _SETS_STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()
