"""Converts text to token ids, with the tokenizers library. Long texts are tokenised on threads, which tenants
share fairly (`fair_threads.py`).

The tokens of a chat's parts are cached for each API key, so that the next turn of a chat tokenises only new parts.
Those of single words are cached for all clients (`word_cache.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cpd.common.blocks import pack_tokens
from cpd.common.errors import CheckpointError
from router.lru import LRU
from router.text.detokenize import Vocabulary
from router.text.fair_threads import FairThreads
from router.text.special_token_splitter import cut_pattern
from router.text.word_cache import WordCache, find_cuts

INLINE_CHARS = 4_096
"""Length of the longest text that is tokenised on the event loop, in about a millisecond."""

WORDWISE_CHARS = 32_768
"""Longer texts bypass the word cache: looking them up would keep the event loop for more than a millisecond."""

CACHED_CHARS = 1 << 24
"""Size of the cache of chat parts, in characters; in bytes it is about twice that."""

MAX_PARTS = 1024
"""A text with this many parts is tokenised whole: to look them all up would take longer."""

PART_OVERHEAD_CHARS = 256
"""Added to the size of each cached part, for its bookkeeping."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. The `owner` of a text is its tenant.

    Args:
        threads: Those of another tokenizer, to share them; None for its own.

    Attributes:
        backend: The tokenizers library's object. Only this module, `Vocabulary`, `cut_pattern` and `find_cuts` use it.
        vocabulary: Converts tokens back to text.
        threads: Do the work on long texts.
    """

    def __init__(self, backend: Backend, threads: FairThreads | None = None) -> None:
        self.backend = backend
        # the checkpoint may have truncation and padding from training; prompts have neither
        backend.no_truncation()
        backend.no_padding()
        self.vocabulary = Vocabulary(backend)
        self._cuts = cut_pattern(backend)
        self._parts: LRU[tuple[bytes, str], bytes] = LRU(CACHED_CHARS)
        self.threads = threads or FairThreads()
        word_cuts = find_cuts(backend)
        self._words = WordCache(word_cuts, self._encode_whole) if word_cuts else None
        self._before, self._after = _special_tokens_around(backend)
        self._showing: dict[frozenset[str], Vocabulary] = {}

    def vocabulary_showing(self, tokens: frozenset[str]) -> Vocabulary:
        """The vocabulary in which these special tokens have text. There are few sets of them, and each is kept."""
        if not tokens:
            return self.vocabulary
        found = self._showing.get(tokens)
        if found is None:
            found = self._showing[tokens] = Vocabulary(self.backend, tokens)
        return found

    async def encode(self, text: str, owner: bytes = b"", *, special_tokens: bool = True) -> bytes:
        """Returns packed token ids of `text`, with the tokenizer's own `special_tokens` around it (such as BOS)."""
        (tokens,) = await self._encode([text], owner, special_tokens=special_tokens)
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""
        # unlike `decode`, the batch call releases the GIL
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=False)
        return str(text)

    def token(self, token_id: int) -> str:
        """A token as the tokenizer's file writes it; empty if there is none with this id."""
        return self.backend.id_to_token(token_id) or ""

    async def encode_chat(self, text: str, owner: bytes) -> bytes:
        """Returns packed token ids of a rendered chat template, without the tokenizer's own special tokens.

        Parts that the same `owner` sent before (a system prompt, earlier turns) are not tokenised again. Parts from
        other owners are: otherwise the time taken would reveal what they sent.
        """
        cuts = self._cuts.finditer(text) if self._cuts else ()
        starts = [match.start() for match in islice(cuts, MAX_PARTS)]
        if len(starts) == MAX_PARTS:
            (tokens,) = await self._encode([text], owner, special_tokens=False)
            return tokens
        parts = [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True) if start < end]
        known = {part: self._parts.get((owner, part)) for part in parts}
        missing = [part for part, tokens in known.items() if tokens is None]
        for part, tokens in zip(missing, await self._encode(missing, owner, special_tokens=False), strict=True):
            known[part] = tokens
            self._parts.put((owner, part), tokens, len(part) + PART_OVERHEAD_CHARS)
        return b"".join([known[part] or b"" for part in parts])

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        return self.backend.token_to_id(token)

    async def _encode(self, texts: Sequence[str], owner: bytes, *, special_tokens: bool) -> list[bytes]:
        if self._words is None or sum(map(len, texts)) > WORDWISE_CHARS:
            return list(map(pack_tokens, await self._encode_whole(texts, owner, special_tokens=special_tokens)))
        encoded = [await self._words.encode(text, owner) for text in texts]
        return [self._before + tokens + self._after for tokens in encoded] if special_tokens else encoded

    async def _encode_whole(
        self, texts: Sequence[str], owner: bytes, *, special_tokens: bool = False
    ) -> list[list[int]]:
        def encode() -> list[list[int]]:
            # unlike `encode`, the batch call releases the GIL, and its fast form computes no offsets
            batch = self.backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
            return [encoding.ids for encoding in batch]

        chars = sum(map(len, texts))
        return encode() if chars <= INLINE_CHARS else await self.threads.run(owner, chars, encode)


def _special_tokens_around(backend: Backend) -> tuple[bytes, bytes]:
    """Returns the packed tokens that the tokenizer puts before and after those of a text."""
    encoding = backend.encode("a")
    inside = [position for position, special in enumerate(encoding.special_tokens_mask) if not special] or [0]
    return pack_tokens(encoding.ids[: inside[0]]), pack_tokens(encoding.ids[inside[-1] + 1 :])


def load_tokenizer(model_dir: Path, config: Mapping[str, Any], threads: FairThreads | None = None) -> Tokenizer:
    """Reads the tokenizer in `tokenizer.json`, with the added tokens that `config` (`tokenizer_config.json`) declares.

    Args:
        threads: See `Tokenizer`.

    Raises:
        CheckpointError: tokenizer.json is missing or can't be read.
    """
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{model_dir} has no tokenizer.json; the router needs one")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file} can't be read: {error}") from None
    declared = [_added_token(token) for _, token in sorted(_declared(config), key=lambda entry: entry[0])]
    backend.add_tokens([token for token in declared if backend.token_to_id(token.content) is None])
    backend.add_special_tokens(list(special_tokens(config).values()))
    return Tokenizer(backend, threads)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens of `tokenizer_config.json`, such as `bos_token`."""
    named = ((name, config.get(name)) for name in (*SPECIAL_TOKENS, *sorted(config)) if name.endswith("_token"))
    texts = ((name, value["content"] if isinstance(value, dict) else value) for name, value in named if value)
    return {name: text for name, text in texts if isinstance(text, str)}


def _declared(config: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    decoder = config.get("added_tokens_decoder") or {}
    return [(int(token_id), token) for token_id, token in decoder.items() if isinstance(token, dict)]


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    names: Sequence[str] = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return AddedToken(token["content"], **{name: token[name] for name in names if name in token})
