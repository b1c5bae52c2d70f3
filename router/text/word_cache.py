"""The tokens of texts word by word, cached: most words of a text were in an earlier one.

Byte-level BPE first splits a text by a regular expression and never merges across the pieces. The expressions that
models use never put a character that is not whitespace and a space after it into one piece. So a text can be cut before
every space between two such characters, and the tokens of its words are those of the text. The space before a word is
part of it.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from cpd.common.blocks import pack_tokens

MAX_WORDS = 1 << 16
"""The cache is emptied when it has this many words: about 16 MB."""

MAX_WORD_CHARS = 32
"""Longer words are not cached."""

_CUT = re.compile(r"(?<=\S) (?=\S)")

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
"""Expressions that have this property. That of GPT-2 has it too; it is built into the library."""

_LETTERS = r'(?<=")[a-z]|\G(?<=[a-z])[a-z]'
"""The bundled model's tokenizer isolates the letters of quoted words with this. Around letters there is no cut."""


class WordCache:
    """Caches the tokens of words, for all clients together, as the tokenizers library does too.

    Args:
        encode: Returns the token ids of each text, without special tokens around them.
    """

    def __init__(self, encode: Callable[[Sequence[str], bytes], Awaitable[list[list[int]]]]) -> None:
        self._encode = encode
        # by the word in UTF-8, without the space: bytes are split and found in two thirds of the time
        self._first: dict[bytes, bytes] = {}
        self._after_space: dict[bytes | None, bytes] = {None: b""}  # None stands for the first word

    async def encode(self, text: str, owner: bytes = b"") -> bytes:
        """Returns the packed token ids of `text`."""
        words: list[Any] = text.encode().split(b" ")
        first, words[0] = words[0], None
        try:
            # an eighth faster than one look-up after the other
            return self._first[first] + b"".join(itemgetter(*words)(self._after_space))
        except KeyError:
            return await self._encode_new(text, owner)

    async def _encode_new(self, text: str, owner: bytes) -> bytes:
        """Encodes a text of which some words are not cached, and caches them."""
        words = text.split(" ")
        tokens = self._find(words)
        if not all(_is_cacheable(words[i]) for i in _missing(tokens)):
            words = _CUT.split(text)  # there is other whitespace beside some spaces; slower
            tokens = self._find(words)
        missing = _missing(tokens)
        texts = {i: " " + words[i] if i else words[i] for i in missing}
        unique = list(dict.fromkeys(texts.values()))
        encoded = dict(zip(unique, map(pack_tokens, await self._encode(unique, owner)), strict=True))
        for i, word in texts.items():
            tokens[i] = encoded[word]
            self._put(self._after_space if i else self._first, words[i], encoded[word])
        return b"".join([word or b"" for word in tokens])

    def _find(self, words: Sequence[str]) -> list[bytes | None]:
        first, *others = [word.encode() for word in words]
        return [self._first.get(first), *map(self._after_space.get, others)]

    def _put(self, cached: dict[Any, bytes], word: str, tokens: bytes) -> None:
        if len(word) <= MAX_WORD_CHARS and _is_cacheable(word):
            if len(self._first) + len(self._after_space) >= MAX_WORDS:
                self._first.clear()
                self._after_space.clear()
                self._after_space[None] = b""
            cached[word.encode()] = tokens


def _missing(tokens: Sequence[bytes | None]) -> list[int]:
    return [i for i, word in enumerate(tokens) if word is None]


def _is_cacheable(word: str) -> bool:
    """True if the text may be cut on both sides of a word between two spaces."""
    return bool(word) and word == word.strip()


def can_cut_at_spaces(backend: Backend) -> bool:
    """True if the tokens of a text are certainly those of its words."""
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return False
    if any(map(_takes_spaces, backend.get_added_tokens_decoder().values())):
        return False
    normalizer, splitter = _state(backend.normalizer), _state(backend.pre_tokenizer)
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
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
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _PATTERNS
    return False


def _takes_spaces(token: AddedToken) -> bool:
    """True if a cut may go through an added token, change whether there is one, or take a space from it."""
    return token.single_word or token.lstrip or token.rstrip or " " in token.content


def _state(component: Any) -> Any:
    """Returns a part of a tokenizer as in tokenizer.json: its pickled state."""
    return None if component is None else orjson.loads(component.__getstate__())
