"""Converts token ids to text, one token at a time.

The joined pieces equal the text of all tokens decoded at once, and no piece ends within a UTF-8 character. There is one
method for each of the two kinds of decoders that tokenizers have:

- Byte-level (GPT-2, Llama 3, Qwen, Mistral's tekken …): a token is a fixed byte string in any context.
- All others (SentencePiece-like with byte fallback, Metaspace, WordPiece …): a token's text depends on its neighbours
  (leading spaces, runs of byte tokens), so it is decoded together with the tokens before it.
"""

import codecs
import re
from typing import Protocol

import orjson
from tokenizers import Tokenizer as Backend

from cpd.common.blocks import TOKEN_BYTES, unpack_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"

_CONTEXT_TOKENS = 8
"""Prompt tokens at the start of a window. One token with text is enough; special tokens have none."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

_MAX_SPLIT = 4
"""Maximum number of tokens of one UTF-8 character."""


class Detokenizer(Protocol):
    """Converts the tokens of one output to text."""

    def push(self, token_id: int) -> str:
        """Adds a token. Returns the text that is certain now; may be empty."""

    def flush(self) -> str:
        """Returns the remaining text after the last token."""


class Vocabulary:
    """The bytes and text of each token of a tokenizer.

    Special tokens have no text in an output, as with `skip_special_tokens` of transformers.

    Args:
        shown: Special tokens that have their name as text, for what parses it.
    """

    def __init__(self, backend: Backend, shown: frozenset[str] = frozenset()) -> None:
        self._backend = backend
        self._byte_level = _is_byte_level(backend)
        self._byte_of = _byte_alphabet()
        self._special = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special and token.content not in shown
        )
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def detokenizer(self, prompt: bytes) -> Detokenizer:
        """Creates a detokenizer for the output that follows a prompt (packed token ids)."""
        return _ByteLevel(self) if self._byte_level else _Window(self, self._backend, prompt)

    def is_special(self, token_id: int) -> bool:
        """True for a special token such as BOS, which has no text."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """True if the token is one byte of a character (byte fallback)."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own UTF-8 bytes; the name if it is a special token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The token's text; None if it depends on the token's neighbours."""
        try:
            return self._texts[token_id]
        except KeyError:
            self._texts[token_id] = text = self._whole_text(token_id)
            return text

    def _whole_text(self, token_id: int) -> str | None:
        if self.is_special(token_id):
            return ""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # models pad their embeddings, so an id can be beyond the vocabulary
        if self._byte_level:
            mapped = [self._byte_of.get(char) for char in token]
            # added tokens are plain text
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


class _ByteLevel:
    """Joins the tokens' bytes. The usual case is fast: the token is whole characters and begins after a whole one."""

    __slots__ = ("_inside", "_utf8", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = _Utf8Decoder(errors="replace")
        self._inside = False  # the bytes so far end within a character

    def push(self, token_id: int) -> str:
        whole = self._vocabulary.whole_text(token_id)
        if whole == "" or (whole is not None and not self._inside):
            return whole
        text = self._utf8.decode(self._vocabulary.token_bytes(token_id))
        self._inside = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Decodes a window of tokens and returns the new text.

    The text of the first `_shown` tokens in the window, `_shown_text`, has been returned already.
    """

    __slots__ = ("_backend", "_ids", "_shown", "_shown_text", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, backend: Backend, prompt: bytes) -> None:
        self._vocabulary = vocabulary
        self._backend = backend
        last: list[int] = unpack_tokens(prompt[-_CONTEXT_TOKENS * TOKEN_BYTES :]).tolist()
        context = [token_id for token_id in last if not vocabulary.is_special(token_id)]
        while context and vocabulary.is_byte(context[-1]):
            context.pop()
        self._ids = context
        self._shown = len(context)
        self._shown_text = self._decode(context)

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_special(token_id):
            return ""
        self._ids.append(token_id)
        if self._vocabulary.is_byte(token_id):
            return ""  # byte tokens in a row are decoded together: one invalid byte makes all of them invalid
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _MAX_SPLIT:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        if new:
            del self._ids[: self._shown]
            self._shown = len(self._ids)
            self._shown_text = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _is_byte_level(backend: Backend) -> bool:
    # the pickled state of a decoder is its JSON
    decoder = orjson.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    while decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """The byte for each character of byte-level tokenizers: printable Latin-1 is itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
