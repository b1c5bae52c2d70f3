"""Responses and stream chunks in OpenAI's format.

For speed, the parts that all chunks of a stream share are encoded once.
"""

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from cpd.common.blocks import unpack_tokens
from router.api.format import Format
from router.api.responses import (
    ApiFinishReason,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ScoredToken,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from router.api.schemas import GenerateRequest
from router.dispatch.output import Choice, Delta, FinishReason, TokenScore
from router.errors import ApiError, error_event
from router.text.detokenize import Vocabulary

_DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""OpenAI's value for tokens with almost no probability, since JSON has no infinity."""


class OpenAIFormat(Format):
    """Writes completions and their chunks.

    Args:
        fingerprint: The model's fingerprint.

    Class attributes:
        ID: Prefix of the response id.
        KIND, CHUNK_KIND: `object` of a whole response and of a chunk.
        PLAIN: The JSON before and after the text of a chunk that has only text; `%d` is the choice's index.
    """

    ID: ClassVar[str]
    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    PLAIN: ClassVar[tuple[bytes, bytes]]

    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary, fingerprint: bytes) -> None:
        self._n = request.n
        self._with_logprobs = request.alternatives is not None
        self._with_ids = request.return_token_ids
        self._vocabulary = vocabulary
        self._common: dict[str, Any] = {
            "id": f"{self.ID}-{secrets.token_hex(12)}",
            "object": self.KIND,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": f"fp_{fingerprint.hex()[:10]}",
        }
        self._head = b""
        if request.stream:
            chunk = orjson.dumps({**self._common, "object": self.CHUNK_KIND})
            self._head = b"data: " + chunk[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._ends_with_usage = request.include_usage
        self._is_plain = not self._with_logprobs and not self._with_ids
        self._usage_now: Callable[[], Usage] | None = None
        self._before_text, after_text = self.PLAIN
        self._after_text = after_text + b',"logprobs":null,"finish_reason":null}' + self._tail

    def count_with(self, usage: Callable[[], Usage]) -> None:
        self._usage_now = usage
        self._is_plain = False

    def delta(self, index: int, delta: Delta) -> bytes:
        """Chunks with new text: one per piece, or one for all of it if the client asked for more than text."""
        if self._is_plain:
            head = self._head + self._before_text % index
            return b"".join([b"%b%b%b" % (head, orjson.dumps(piece), self._after_text) for piece in delta.pieces])
        return self._chunk(index, None, delta)

    def final(self, choice: Choice, delta: Delta) -> bytes:
        return self._chunk(choice.index, choice.finish, delta)

    def closing(self, usage: Usage) -> bytes:
        """The chunk with the usage, if the client asked for it, and the end."""
        return self._head + _tail(usage) + _DONE if self._ends_with_usage else _DONE

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    @abstractmethod
    def _chunk(self, index: int, finish: FinishReason | None, delta: Delta) -> bytes: ...

    def _end(self) -> bytes:
        """The end of a chunk, after its choice."""
        return self._tail if self._usage_now is None else _tail(self._usage_now())

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes. An incomplete character has no text and gets OpenAI's name for its bytes."""
        raw = self._vocabulary.token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _response(self, choices: Sequence[Mapping[str, Any]], usage: Usage, **extra: Any) -> bytes:
        return orjson.dumps({**self._common, "choices": choices, "usage": usage, **extra})


class ChatFormat(OpenAIFormat):
    """`chat.completion` and its chunks."""

    ID, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"
    PLAIN = b'{"index":%d,"delta":{"content":', b"}"

    def first(self, index: int, prompt: bytes, usage: Usage) -> bytes:
        delta: ChatDelta = {"role": "assistant", "content": ""}
        choice: ChatChunkChoice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        extra = b""
        if self._with_ids and index == 0:
            extra = b',"prompt_token_ids":' + orjson.dumps(_ids(prompt))
        return self._head + orjson.dumps(choice) + b"]" + extra + self._end()[1:]

    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        extra = {"prompt_token_ids": _ids(prompts[0])} if self._with_ids else {}
        return self._response([self._choice(choice) for choice in choices], usage, **extra)

    def _choice(self, choice: Choice) -> ChatChoice:
        delta = choice.take()
        return self._chat_choice(choice, delta, {"role": "assistant", "content": delta.text, "refusal": None})

    def _chat_choice(self, choice: Choice, delta: Delta, message: ChatMessage) -> ChatChoice:
        written: ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(delta.scores),
            "finish_reason": choice.finish,
        }
        if self._with_ids:
            written["token_ids"] = delta.token_ids
        return written

    def _chunk(self, index: int, finish: FinishReason | None, delta: Delta) -> bytes:
        return self._chat_chunk(index, {"content": delta.text} if finish is None else {}, finish, delta)

    def _chat_chunk(self, index: int, new: ChatDelta, finish: ApiFinishReason | None, delta: Delta) -> bytes:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": new,
            "logprobs": self._logprobs(delta.scores) if delta.scores else None,
            "finish_reason": finish,
        }
        if self._with_ids:
            choice["token_ids"] = delta.token_ids
        return self._head + orjson.dumps(choice) + self._end()

    def _logprobs(self, scores: Sequence[TokenScore]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        content: list[ScoredToken] = [
            {**self._scored(score.token_id, score.logprob), "top_logprobs": [self._scored(*top) for top in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token_id: int, logprob: float) -> TokenLogprob:
        text, raw = self._token(token_id)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class CompletionFormat(OpenAIFormat):
    """`text_completion` and its chunks."""

    ID, KIND, CHUNK_KIND = "cmpl", "text_completion", "text_completion"
    PLAIN = b'{"index":%d,"text":', b""

    def __init__(self, request: GenerateRequest, vocabulary: Vocabulary, fingerprint: bytes) -> None:
        super().__init__(request, vocabulary, fingerprint)
        self._opening: dict[int, bytes] = {}

    def first(self, index: int, prompt: bytes, usage: Usage) -> bytes:
        # a text has no opening chunk; the prompt's token ids are in its first chunk
        if self._with_ids:
            self._opening[index] = prompt
        return b""

    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        written = []
        for choice in choices:
            entry = self._entry(choice.index, choice.finish, choice.take())
            entry["text"] = self._echo(choice.index // self._n) + entry["text"]
            if self._with_ids:
                entry["prompt_token_ids"] = _ids(prompts[choice.index // self._n])
            written.append(entry)
        return self._response(written, usage)

    def _echo(self, position: int) -> str:
        """The text of a prompt, if it is part of the response."""
        return ""

    def _chunk(self, index: int, finish: FinishReason | None, delta: Delta) -> bytes:
        entry = self._entry(index, finish, delta)
        if (prompt := self._opening.pop(index, None)) is not None:
            entry["prompt_token_ids"] = _ids(prompt)
        return self._head + orjson.dumps(entry) + self._end()

    def _entry(self, index: int, finish: FinishReason | None, delta: Delta) -> TextChoice:
        entry: TextChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.scores),
            "finish_reason": finish,
        }
        if self._with_ids:
            entry["token_ids"] = delta.token_ids
        return entry

    def _logprobs(self, scores: Sequence[TokenScore]) -> TextLogprobs | None:
        if not self._with_logprobs:
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


class EchoedCompletionFormat(CompletionFormat):
    """`text_completion` and its chunks, whose texts begin with their prompts.

    Args:
        prompts: The texts of the prompts.
    """

    def __init__(
        self, request: GenerateRequest, vocabulary: Vocabulary, fingerprint: bytes, *, prompts: Sequence[str]
    ) -> None:
        super().__init__(request, vocabulary, fingerprint)
        self._prompts = prompts

    def first(self, index: int, prompt: bytes, usage: Usage) -> bytes:
        opening = super().first(index, prompt, usage)
        return opening + self._chunk(index, None, Delta([self._echo(index // self._n)], [], []))

    def _echo(self, position: int) -> str:
        return self._prompts[position]


def _tail(usage: Usage) -> bytes:
    return b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


def _ids(prompt: bytes) -> list[int]:
    ids: list[int] = unpack_tokens(prompt).tolist()
    return ids
