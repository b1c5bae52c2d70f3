"""What is asked of the server: a workload is a numbered row of sessions, a session a row of turns."""

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
    """What a user says next.

    Args:
        text: The new text. The server sees it after the session's opening and all turns and answers before.
        input_len: Tokens that the whole prompt should have, answers before included; 0 if the workload doesn't say.
        output_len: Tokens wanted back.
        think_s: Seconds between the end of the last answer and this turn.
    """

    text: str
    input_len: int
    output_len: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation; most workloads have one turn in each.

    Args:
        index: Its number in the workload.
        turns: At least one.
        opening: Messages before the first turn, such as a system prompt.
    """

    index: int
    turns: Sequence[Turn]
    opening: Sequence[Message] = ()


class Workload(ABC):
    """Makes sessions. The same settings and seed give byte-identical ones, in any process and order."""

    @property
    def size(self) -> int | None:
        """How many sessions there are; None is no limit."""
        return None

    @property
    def times_s(self) -> Sequence[float] | None:
        """When each session is due, in seconds from the start, ascending, where the workload says so (a trace)."""
        return None

    @abstractmethod
    def session(self, index: int) -> Session:
        """The session with this number, 0 <= index < size."""

    def priming(self) -> Sequence[Session]:
        """Sessions to run, unmeasured, before the first one: they bring the server's cache to its intended state."""
        return ()
