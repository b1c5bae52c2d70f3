"""The tokens of texts word by word, remembered: most words of a text were in another one before.

Byte-level BPE first splits a text by a regular expression, and merges nothing across. The ones that models use have in
common that what is no whitespace and a space after it are never in one piece. So a text can be cut before every space
between two characters that are none, and the tokens of the parts are the tokens of the whole.

Words of short texts are looked up one by one, those of long ones all at once by array operations.
"""

from collections.abc import Awaitable, Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from cpd.blocks import pack_tokens
from router.wordtable import MOST_BYTES, MOST_TOKENS, Ints, WordTable, runs

SHORT_CHARS = 1024
"""Array operations take longer for a text of no more."""

_SPACE = 0x20

_LAST_SPACE = 0x3000
"""The highest character that is whitespace."""

_TABLE_BITS = 17
_MOST_WORDS = 1 << 16
"""What is remembered of long texts, in 9 MB at most."""

_MOST_SHORT = 1 << 14
"""And of short ones, in 4 MB at most."""

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
"""Known to be such; that of GPT-2 is built into the library."""

_LETTERS = r'(?<=")[a-z]|\G(?<=[a-z])[a-z]'
"""Those of a word in quotation marks, which the bundled model's tokenizer isolates: around letters there is no cut."""


class Words:
    """The words of all texts so far. (The library remembers words, too, and like here for all clients together.)

    Args:
        encode: Tokens of many short texts, each by itself, without special ones around it.
    """

    def __init__(self, encode: Callable[[list[str]], Awaitable[list[list[int]]]]) -> None:
        self._encode = encode
        self._known = WordTable(_TABLE_BITS)
        self._short: dict[str, bytes] = {}
        self._visible = np.array([not chr(code).isspace() for code in range(_LAST_SPACE + 2)])  # the last: all others

    async def encode(self, text: str) -> bytes:
        """Tokens of `text`, packed."""
        return await (self._encode_short(text) if len(text) <= SHORT_CHARS else self._encode_long(text))

    async def _encode_short(self, text: str) -> bytes:
        first, *rest = text.split(" ")
        words = [first, *[" " + word for word in rest]]
        known = {word: self._short.get(word, b"") for word in words}
        unknown = [word for word, tokens in known.items() if not tokens]
        if not all(map(_is_apart, unknown)):
            (token_ids,) = await self._encode([text])
            return pack_tokens(token_ids)
        if unknown:
            new = dict(zip(unknown, map(pack_tokens, await self._encode(unknown)), strict=True))
            known |= new
            if len(self._short) + len(new) > _MOST_SHORT:
                self._short.clear()
            self._short |= {word: tokens for word, tokens in new.items() if len(word) <= MOST_BYTES}
        return b"".join([known[word] for word in words])

    async def _encode_long(self, text: str) -> bytes:
        data = text.encode()
        starts, lengths = self._cut(text, data)
        slots = self._known.find(data, starts, lengths)
        unknown = np.flatnonzero(slots < 0)
        if not len(unknown):
            return self._known.tokens(slots)[0].tobytes()
        known = np.flatnonzero(slots >= 0)
        known_tokens, known_counts = self._known.tokens(slots[known])
        words = [data[start : start + length] for start, length in zip(starts[unknown], lengths[unknown], strict=True)]
        new = list(dict.fromkeys(words))
        encoded = dict(zip(new, await self._encode([word.decode() for word in new]), strict=True))
        self._remember(encoded)
        counts = np.empty(len(slots), dtype=np.int64)
        counts[known], counts[unknown] = known_counts, [len(encoded[word]) for word in words]
        begins = np.cumsum(counts) - counts
        tokens = np.empty(int(counts.sum()), dtype=np.int32)
        tokens[runs(begins[known], known_counts)] = known_tokens
        tokens[runs(begins[unknown], counts[unknown])] = list(chain.from_iterable(encoded[word] for word in words))
        return tokens.tobytes()

    def _cut(self, text: str, data: bytes) -> tuple[Ints, Ints]:
        """Where words begin in the UTF-8 of a text, and how long they are. The space before a word is part of it."""
        if text.isascii():
            chars: npt.NDArray[Any] = np.frombuffer(data, dtype=np.uint8)
            visible = chars > _SPACE  # control characters are no visible ones either: fewer cuts do no harm
        else:
            chars = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
            visible = self._visible.take(chars, mode="clip")
        cuts = np.flatnonzero((chars[1:-1] == _SPACE) & visible[:-2] & visible[2:]) + 1
        if chars.itemsize > 1:
            sizes = 1 + (chars > 0x7F) + (chars > 0x7FF).view(np.uint8) + (chars > 0xFFFF)
            cuts = (np.cumsum(sizes) - sizes)[cuts]
        bounds = np.concatenate(([0], cuts, [len(data)]))
        return bounds[:-1], np.diff(bounds)

    def _remember(self, encoded: Mapping[bytes, list[int]]) -> None:
        new = {word: ids for word, ids in encoded.items() if len(word) <= MOST_BYTES and 0 < len(ids) <= MOST_TOKENS}
        if len(self._known) + len(new) > _MOST_WORDS:
            self._known = WordTable(_TABLE_BITS)
        self._known.add(new)


def _is_apart(word: str) -> bool:
    """Whether there is a cut before and after a word, which is what was between two spaces, with the first of them."""
    visible = word.strip()
    return bool(visible) and word in (visible, " " + visible)


def is_cut_at_spaces(backend: Backend) -> bool:
    """Whether the tokens of a text are those of its words, for certain."""
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
    """Whether a cut may go through an added token, or change whether it is one, or take a space from it."""
    return token.single_word or token.lstrip or token.rstrip or " " in token.content


def _state(component: Any) -> Any:
    """A part of a tokenizer as in tokenizer.json: its pickled state."""
    return None if component is None else orjson.loads(component.__getstate__())
