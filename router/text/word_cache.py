"""The tokens of texts word by word, cached: most words of a text were in an earlier one.

Byte-level BPE first splits a text by a regular expression and never merges across the pieces. Where the expression
always ends a piece, whatever else the text contains, the text can be cut, and the tokens of its words are the tokens of
the text. `Cuts` describes these places: before most spaces, which belong to the word after them, and at newlines.
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
"""Markers. A word without a space before it begins with `_NO_SPACE`; `_SPACE` replaces each space inside a word. Texts
that contain either are not cached."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where texts can be cut.

    Attributes:
        line: Matches the newlines at which a text can be cut.
        cut_line: Replaces such a newline. It contains the newline and a space, at which the text is then split.
        uncut_space: Matches the spaces before which a text can't be cut.
        ends_in_whitespace: True if a word that ends in whitespace may be cached.
    """

    line: re.Pattern[str]
    cut_line: str
    uncut_space: re.Pattern[str]
    ends_in_whitespace: bool


_AFTER_LINES = Cuts(re.compile(r"\n(?=[^\S\r\n]*\S)"), f"\n {_NO_SPACE}", re.compile(r" (?!\S)"), True)
"""Cuts for `_PATTERNS`, which end a piece after the last newline and before the last space between two words."""

_BEFORE_LINES = Cuts(re.compile(r"(?<=\S)\n(?=\S)"), f" {_NO_SPACE}\n", re.compile(r"(?<!\S) | (?!\S)"), False)
"""Cuts for GPT-2's expression, also where digits are split off first, which changes the whitespace before them."""

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
"""Expressions that `_AFTER_LINES` is for."""

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
            # At a space of `uncut_space`, the word before or after is never cached, so a wrong cut is noticed.
            # `itemgetter` is an eighth faster than one look-up after the other.
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
        if len(word) > MAX_WORD_BYTES or not (self._cuts.ends_in_whitespace or _text(word)[-1:].strip()):
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
