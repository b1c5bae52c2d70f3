"""The tokens of texts word by word, remembered: most words of a text were in another one before.

Byte-level BPE first splits a text by a regular expression, and merges nothing across. The ones that models use have in
common that what is no whitespace and a space after it are never in one piece. So a text can be cut before every space
between two characters that are none, and the tokens of the parts are the tokens of the whole.
"""

import re
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

_CUT = re.compile(r" (?<=\S )(?=\S)")
"""The space at its beginning makes the search fast."""

_MOST_WORDS = 1 << 16
_MOST_CHARS = 32
"""What is remembered: so many words of so many characters, some 15 MB at most."""

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
        self._known: dict[str, tuple[int, ...]] = {}

    async def encode(self, text: str) -> list[int]:
        """Tokens of `text`."""
        known = self._known
        first, *words = text.split(" ")  # much faster than `_CUT.split`, and mostly the same
        if first and not first[-1].isspace():
            try:
                tokens = list(chain.from_iterable(map(known.__getitem__, words)))
            except KeyError:
                pass
            else:
                (beginning,) = await self._encode([first])
                return beginning + tokens
        first, *words = _CUT.split(text)  # the words lost the space before them
        missing = list(set(words) - known.keys())
        beginning, *encoded = await self._encode([first, *(f" {word}" for word in missing)])
        new = dict(zip(missing, map(tuple, encoded), strict=True))
        if len(known) + len(new) > _MOST_WORDS:
            self._known = {}  # nobody who is still waiting for words loses some: they have the old one
        # the last one may end with whitespace, after which there would be no cut
        known.update({word: ids for word, ids in new.items() if len(word) <= _MOST_CHARS and not word[-1].isspace()})
        return [*beginning, *chain.from_iterable(known.get(word) or new[word] for word in words)]


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
