"""The tokens of texts word by word, cached: most words of a text were in an earlier one.

Byte-level BPE first splits a text by a regular expression and never merges across the pieces. A text can be cut where
all expressions that models use have a boundary whatever stands around it, and the tokens of its words are those of the
text. `Cuts` has these places: before most spaces, which belong to the word behind them, and at newlines.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from cpd.common.blocks import pack_tokens

MAX_WORDS = 1 << 16
"""The cache is emptied when it has this many words: about 16 MB."""

MAX_WORD_BYTES = 64
"""Longer words are not cached."""

_NO_SPACE, _SPACE = "\0", "\1"
"""A word begins with the first if no space is before it, and has the second for each space. Rare in texts."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where texts can be cut.

    Attributes:
        line: At these newlines.
        cut_line: What stands for such a newline where words are divided by spaces.
        uncut_space: There is no cut before these spaces.
        before_whitespace: There may be one between whitespace and a space.
    """

    line: re.Pattern[str]
    cut_line: str
    uncut_space: re.Pattern[str]
    before_whitespace: bool


_AFTER_LINES = Cuts(re.compile(r"\n(?=[^\S\r\n]*\S)"), f"\n {_NO_SPACE}", re.compile(r" (?!\S)"), True)
"""Of `_PATTERNS`: the last newline between words ends a piece, and the last space before a word belongs to it."""

_BEFORE_LINES = Cuts(re.compile(r"(?<=\S)\n(?=\S)"), f" {_NO_SPACE}\n", re.compile(r"(?<!\S) | (?!\S)"), False)
"""Of GPT-2's expression, also around digits, which divide whitespace before them."""

_PATTERNS = frozenset(
    {
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    }
)
"""Expressions with which texts can be cut as `_AFTER_LINES` says."""

_LETTERS = r'(?<=")[a-z]|\G(?<=[a-z])[a-z]'
"""The bundled model's tokenizer isolates the letters of quoted words with this. Around letters there is no cut."""


class WordCache:
    """Caches the tokens of words, for all clients together, as the tokenizers library does too.

    Args:
        cuts: Where texts can be cut.
        encode: Returns the token ids of each text, without special tokens around them.
    """

    def __init__(self, cuts: Cuts, encode: Callable[[Sequence[str], bytes], Awaitable[list[list[int]]]]) -> None:
        self._cuts = cuts
        self._encode = encode
        # by the word in UTF-8: bytes are split and found in two thirds of the time
        self._cached: dict[bytes | None, bytes] = {None: b""}  # None makes `itemgetter` return a tuple

    async def encode(self, text: str, owner: bytes = b"") -> bytes:
        """Returns the packed token ids of `text`."""
        if _NO_SPACE in text or _SPACE in text:
            [ids] = await self._encode([text], owner)
            return pack_tokens(ids)
        text = _NO_SPACE + text
        if "\n" in text:
            text = self._cuts.line.sub(self._cuts.cut_line, text)
        try:
            # If one of the spaces is in `uncut_space`, a word before or behind it is not in the cache.
            # An eighth faster than one look-up after the other:
            return b"".join(itemgetter(None, *text.encode().split(b" "))(self._cached))
        except KeyError:
            return await self._encode_new(self._cuts.uncut_space.sub(_SPACE, text).encode().split(b" "), owner)

    async def _encode_new(self, words: Sequence[bytes], owner: bytes) -> bytes:
        """Encodes words of which some are not cached, and caches them."""
        found = {word: self._cached.get(word) for word in words}
        missing = [word for word, tokens in found.items() if tokens is None]
        for word, ids in zip(missing, await self._encode([_text(word) for word in missing], owner), strict=True):
            found[word] = tokens = pack_tokens(ids)
            self._put(word, tokens)
        return b"".join([found[word] or b"" for word in words])

    def _put(self, word: bytes, tokens: bytes) -> None:
        if len(word) > MAX_WORD_BYTES or not (self._cuts.before_whitespace or _text(word)[-1:].strip()):
            return
        if len(self._cached) > MAX_WORDS:
            self._cached.clear()
            self._cached[None] = b""
        self._cached[word] = tokens


def _text(word: bytes) -> str:
    text = word.decode().replace(_SPACE, " ")
    return text.removeprefix(_NO_SPACE) if text.startswith(_NO_SPACE) else f" {text}"


def find_cuts(backend: Backend) -> Cuts | None:
    """Returns where the tokens of a text are certainly those of its words; None if nowhere."""
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return None
    if any(map(_takes_whitespace, backend.get_added_tokens_decoder().values())):
        return None
    normalizer, splitter = _state(backend.normalizer), _state(backend.pre_tokenizer)
    if normalizer is not None and normalizer["type"] != "NFC":
        return None
    match splitter:
        case {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, last]}:
            splitter = last  # around digits there is no cut
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "Digits"},
                last,
            ],
        } if pattern == _LETTERS:
            splitter = last
    match splitter:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _BEFORE_LINES
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return _AFTER_LINES if pattern in _PATTERNS else None
    return None


def _takes_whitespace(token: AddedToken) -> bool:
    """True if a cut may go through an added token, change whether there is one, or take whitespace from it."""
    return token.single_word or token.lstrip or token.rstrip or " " in token.content or "\n" in token.content


def _state(component: Any) -> Any:
    """Returns a part of a tokenizer as in tokenizer.json: its pickled state."""
    return None if component is None else orjson.loads(component.__getstate__())
