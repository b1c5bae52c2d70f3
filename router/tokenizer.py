"""Text to token ids, with the tokenizers library (never on the event loop where it takes long).

What came before is not tokenised again: parts of chats, by the API key that sent them, and single words.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cpd.blocks import pack_tokens
from cpd.errors import CheckpointError
from router.lru import LRU
from router.markers import cut_pattern
from router.words import Words, is_cut_at_spaces

INLINE_CHARS = 8_192
"""So much text is encoded at once (under about a millisecond); more of it on a thread."""

WORDWISE_CHARS = 32_768
"""A longer text is not looked up word by word: that would take longer than a millisecond."""

REMEMBERED_CHARS = 1 << 24
"""Of parts of chats whose tokens are remembered; about twice as many bytes."""

MOST_PARTS = 1024
"""A chat has fewer parts."""

PART_CHARS = 256
"""What a part counts beside its characters."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        backend: The tokenizers library's object.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # a checkpoint may carry what it was trained with; prompts are never cut or filled up
        backend.no_truncation()
        backend.no_padding()
        self._cuts = cut_pattern(backend)
        self._parts: LRU[tuple[bytes, str], bytes] = LRU(REMEMBERED_CHARS)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._words = Words(self._encode_whole) if is_cut_at_spaces(backend) else None
        self._before, self._after = _special_tokens_around(backend)

    async def encode(self, text: str) -> bytes:
        """Packed token ids of `text`, with the tokenizer's own special tokens (such as BOS) around it."""
        (tokens,) = await self._encode([text], special_tokens=True)
        return tokens

    async def encode_chat(self, text: str, owner: bytes) -> bytes:
        """Packed token ids of what a chat template made, without the tokenizer's own special tokens.

        The parts of a chat that the same `owner` sent before (the same system prompt, earlier turns) are not tokenised
        again. Other owners' are: how long it takes would tell what they sent.
        """
        cuts = self._cuts.finditer(text) if self._cuts else ()
        starts = [match.start() for match in islice(cuts, MOST_PARTS)]
        if len(starts) == MOST_PARTS:  # no chat, but somebody's text: looking up its parts takes longer than they do
            (tokens,) = await self._encode([text], special_tokens=False)
            return tokens
        parts = [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True) if start < end]
        known = {part: self._parts.get((owner, part)) for part in parts}
        missing = [part for part, tokens in known.items() if tokens is None]
        for part, tokens in zip(missing, await self._encode(missing, special_tokens=False), strict=True):
            known[part] = tokens
            self._parts.put((owner, part), tokens, len(part) + PART_CHARS)
        return b"".join([known[part] or b"" for part in parts])

    async def _encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[bytes]:
        if self._words is None or sum(map(len, texts)) > WORDWISE_CHARS:
            return list(map(pack_tokens, await self._encode_whole(texts, special_tokens=special_tokens)))
        encoded = [await self._words.encode(text) for text in texts]
        return [self._before + tokens + self._after for tokens in encoded] if special_tokens else encoded

    async def _encode_whole(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[list[int]]:
        def encode() -> list[list[int]]:
            # the batch call, unlike `encode`, releases the GIL, and its fast form computes no offsets
            batch = self.backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
            return [encoding.ids for encoding in batch]

        if sum(map(len, texts)) <= INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)


def _special_tokens_around(backend: Backend) -> tuple[bytes, bytes]:
    """What the tokenizer puts before and after the tokens of a text, packed."""
    encoding = backend.encode("a")
    inside = [position for position, special in enumerate(encoding.special_tokens_mask) if not special] or [0]
    return pack_tokens(encoding.ids[: inside[0]]), pack_tokens(encoding.ids[inside[-1] + 1 :])


def load_tokenizer(model_dir: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, completed by what `config` (`tokenizer_config.json`) declares.

    Raises:
        CheckpointError: There is none, or it can't be read.
    """
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{model_dir} has no tokenizer.json, which the router needs to read and write text")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{file} can't be read: {error}") from None
    declared = [_added_token(token) for _, token in sorted(_declared(config), key=lambda entry: entry[0])]
    backend.add_tokens([token for token in declared if backend.token_to_id(token.content) is None])
    backend.add_special_tokens(list(special_tokens(config).values()))
    return Tokenizer(backend)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of `tokenizer_config.json`, such as `bos_token`."""
    named = ((name, config.get(name)) for name in (*SPECIAL_TOKENS, *sorted(config)) if name.endswith("_token"))
    texts = ((name, value["content"] if isinstance(value, dict) else value) for name, value in named if value)
    return {name: text for name, text in texts if isinstance(text, str)}


def _declared(config: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    decoder = config.get("added_tokens_decoder") or {}
    return [(int(token_id), token) for token_id, token in decoder.items() if isinstance(token, dict)]


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    names: Sequence[str] = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return AddedToken(token["content"], **{name: token[name] for name in names if name in token})
