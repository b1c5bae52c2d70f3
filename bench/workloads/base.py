"""A workload is a numbered sequence of sessions; a session is a sequence of turns."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's next message.

    Args:
        text: The new text. The prompt is the session's opening, all earlier turns and answers, and this text.
        input_len: Planned tokens of the whole prompt; 0 if unknown.
        output_len: Requested output tokens.
        think_s: Seconds between the end of the last answer and this turn.
    """

    text: str
    input_len: int
    output_len: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation; in most workloads it has one turn.

    Args:
        index: Number of the session in the workload.
        turns: At least one turn.
        opening: Messages before the first turn, such as a system prompt.
    """

    index: int
    turns: Sequence[Turn]
    opening: Sequence[Message] = ()


class Workload(ABC):
    """Makes sessions. Equal settings and seeds give byte-identical sessions, in any process and order."""

    @property
    def size(self) -> int | None:
        """Number of sessions; None for no limit."""
        return None

    @property
    def times_s(self) -> Sequence[float] | None:
        """Due times of sessions in seconds from the start, ascending, if the workload has them (a trace)."""
        return None

    @abstractmethod
    def session(self, index: int) -> Session:
        """The session with this number, 0 <= index < size."""

    def priming(self) -> Sequence[Session]:
        """Sessions to send before the run, without measuring, to fill the server's cache."""
        return ()
