"""Text to token ids, with the tokenizers library (never on the event loop where it takes long)."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from cpd.errors import CheckpointError

INLINE_CHARS = 8_192
"""Shorter texts are encoded at once (under about a millisecond); longer ones on a thread."""

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
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of `text`, with the tokenizer's own special tokens (such as BOS) around it or without."""
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text, special_tokens=special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self.encode_now(text, special_tokens=special_tokens))

    def encode_now(self, text: str, *, special_tokens: bool) -> list[int]:
        """As `encode`, on this thread."""
        # the batch call, unlike `encode`, releases the GIL, and its fast form computes no offsets
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        return ids


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
