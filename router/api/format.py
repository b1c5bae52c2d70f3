"""What writes the response to a call, in the form of one API."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from router.api.responses import ApiFinishReason, Usage
from router.api.schemas import ChatRequest
from router.dispatch.output import Choice, Delta
from router.errors import ApiError
from router.text.detokenize import Vocabulary
from router.text.parsers.output import OutputParser


class Format(ABC):
    """Writes the response of one call, as a stream or in one piece.

    A stream is `first` of each choice, then `delta`s and one `final` of each, then `closing`, or `failure` at any time.

    Class attributes:
        PARSES: The output is parsed, which takes long for a long one.
    """

    PARSES: ClassVar[bool] = False

    def count_with(self, usage: Callable[[], Usage]) -> None:  # noqa: B027 - most APIs have no such option
        """Puts the `usage` so far into every event of new text, in APIs that have that option."""

    @abstractmethod
    def first(self, index: int, prompt: bytes, usage: Usage) -> bytes:
        """The events that open a choice of a prompt (packed token ids)."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of new text."""

    @abstractmethod
    def final(self, choice: Choice, delta: Delta) -> bytes:
        """The events that close a choice which has ended; `delta` has no text."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """The events after all choices."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that fails after it began."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], prompts: Sequence[bytes], usage: Usage) -> bytes:
        """The response in one piece."""

    async def written(self) -> None:  # noqa: B027 - most do nothing then
        """Called when all of a response is written, before its end is sent."""


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the outputs of a chat are parsed.

    Attributes:
        new_parser: Makes the parser of one choice.
        finish_with_calls: OpenAI's finish reason of a choice that ends by itself and has tool calls.
    """

    new_parser: Callable[[], OutputParser]
    finish_with_calls: ApiFinishReason = "tool_calls"


class ChatForm(Protocol):
    """Makes what writes the response of a chat."""

    def __call__(
        self, request: ChatRequest, vocabulary: Vocabulary, fingerprint: bytes, parsing: Parsing | None
    ) -> Format:
        """Makes it for one call.

        Args:
            fingerprint: The model's fingerprint.
            parsing: How outputs are parsed; None if there is nothing but content in them.
        """
