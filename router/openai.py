"""Responses and stream chunks in OpenAI's shapes.

Streams are built for speed: what stays the same in all chunks of a choice is written once, as bytes.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from cpd.blocks import unpack_tokens
from router.detokenize import Vocabulary
from router.output import Choice, Delta, TokenScore

DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""What OpenAI's API says for tokens of (next to) no probability; JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Format(Protocol):
    """How the response of one call is written."""

    def first(self, index: int, prompt: bytes) -> bytes:
        """The chunk that opens a choice of a prompt, whose tokens are packed."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """A chunk for each piece of new text; all of it in one where more than text was asked for."""

    def final(self, index: int, finish: str, delta: Delta) -> bytes:
        """The chunk that closes a choice; `delta` has no text."""

    def usage(self, usage: Usage) -> bytes:
        """The chunk after all choices, where it was asked for."""

    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        """The response in one piece."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a call's response has in common.

    Attributes:
        id: `chatcmpl-…` or `cmpl-…`.
        fingerprint: OpenAI's `system_fingerprint`.
        include_usage: The stream ends with a usage chunk, and the chunks before it say `usage: null`.
        logprobs: Log-probabilities were asked for.
        token_ids: Token ids were asked for.
        n: Choices of each prompt.
    """

    id: str
    model: str
    fingerprint: str
    include_usage: bool
    logprobs: bool
    token_ids: bool
    n: int


class _Writer:
    """What both formats share: the frame around the choices."""

    def __init__(self, shape: Shape, vocabulary: Vocabulary, kind: str, chunk_kind: str) -> None:
        self._shape = shape
        self._vocabulary = vocabulary
        self._common: dict[str, Any] = {
            "id": shape.id,
            "object": kind,
            "created": int(time.time()),
            "model": shape.model,
            "system_fingerprint": shape.fingerprint,
        }
        chunk = orjson.dumps({**self._common, "object": chunk_kind})
        self._head = b"data: " + chunk[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + orjson.dumps(usage.to_json()) + b"}\n\n"

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes; part of a character has no text, and is named as OpenAI does."""
        raw = self._vocabulary.token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _response(self, choices: Sequence[Mapping[str, Any]], usage: Usage, **extra: Any) -> bytes:
        return orjson.dumps({**self._common, "choices": choices, "usage": usage.to_json(), **extra})


class ChatFormat(_Writer):
    """`chat.completion` and its chunks."""

    def __init__(self, shape: Shape, vocabulary: Vocabulary) -> None:
        super().__init__(shape, vocabulary, "chat.completion", "chat.completion.chunk")
        self._plain = not shape.logprobs and not shape.token_ids
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def first(self, index: int, prompt: bytes) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra = b""
        if self._shape.token_ids and index == 0:
            extra = b',"prompt_token_ids":' + orjson.dumps(_ids(prompt))
        return self._head + orjson.dumps(choice) + b"]" + extra + self._tail[1:]

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._plain:
            head = b'%b{"index":%d,"delta":{"content":' % (self._head, index)
            return b"".join([b"%b%b%b" % (head, orjson.dumps(piece), self._plain_tail) for piece in delta.pieces])
        return self._chunk(index, {"content": delta.text}, None, delta)

    def final(self, index: int, finish: str, delta: Delta) -> bytes:
        return self._chunk(index, {}, finish, delta)

    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        extra = {"prompt_token_ids": _ids(prompts[0])} if self._shape.token_ids else {}
        return self._response([self._choice(choice) for choice in choices], usage, **extra)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        delta = choice.take()
        written = {
            "index": choice.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta.scores),
            "finish_reason": choice.finish,
        }
        return written | ({"token_ids": delta.token_ids} if self._shape.token_ids else {})

    def _chunk(self, index: int, content: Mapping[str, str], finish: str | None, delta: Delta) -> bytes:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta.scores) if delta.scores else None,
            "finish_reason": finish,
        }
        if self._shape.token_ids:
            choice["token_ids"] = delta.token_ids
        return self._head + orjson.dumps(choice) + self._tail

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self._shape.logprobs:
            return None
        content = [
            {**self._scored(score.token_id, score.logprob), "top_logprobs": [self._scored(*top) for top in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token_id)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class CompletionFormat(_Writer):
    """`text_completion` and its chunks."""

    def __init__(self, shape: Shape, vocabulary: Vocabulary) -> None:
        super().__init__(shape, vocabulary, "text_completion", "text_completion")
        self._plain = not shape.logprobs and not shape.token_ids
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._opening: dict[int, bytes] = {}

    def first(self, index: int, prompt: bytes) -> bytes:
        # nothing opens a text; the prompt's tokens go with its first chunk
        if self._shape.token_ids:
            self._opening[index] = prompt
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        if self._plain:
            head = b'%b{"index":%d,"text":' % (self._head, index)
            return b"".join([b"%b%b%b" % (head, orjson.dumps(piece), self._plain_tail) for piece in delta.pieces])
        return self._chunk(index, None, delta)

    def final(self, index: int, finish: str, delta: Delta) -> bytes:
        return self._chunk(index, finish, delta)

    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        written = []
        for choice in choices:
            entry = self._entry(choice.index, choice.finish, choice.take())
            if self._shape.token_ids:
                entry["prompt_token_ids"] = _ids(prompts[choice.index // self._shape.n])
            written.append(entry)
        return self._response(written, usage)

    def _chunk(self, index: int, finish: str | None, delta: Delta) -> bytes:
        entry = self._entry(index, finish, delta)
        if (prompt := self._opening.pop(index, None)) is not None:
            entry["prompt_token_ids"] = _ids(prompt)
        return self._head + orjson.dumps(entry) + self._tail

    def _entry(self, index: int, finish: str | None, delta: Delta) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.scores),
            "finish_reason": finish,
        }
        if self._shape.token_ids:
            entry["token_ids"] = delta.token_ids
        return entry

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self._shape.logprobs:
            return None
        return {
            "tokens": [self._token(score.token_id)[0] for score in scores],
            "token_logprobs": [max(score.logprob, LEAST_LOGPROB) for score in scores],
            "top_logprobs": [self._alternatives(score) for score in scores],
            "text_offset": [score.offset for score in scores],
        }

    def _alternatives(self, score: TokenScore) -> dict[str, float]:
        """The most likely tokens; the chosen one is always among them."""
        scored = [*score.top, (score.token_id, score.logprob)]
        return {self._token(token_id)[0]: max(logprob, LEAST_LOGPROB) for token_id, logprob in scored}


def _ids(prompt: bytes) -> list[int]:
    ids: list[int] = unpack_tokens(prompt).tolist()
    return ids
