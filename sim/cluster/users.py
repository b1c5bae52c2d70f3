"""The simulated users: their conversations and the records of their requests."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from bench.metrics import request_row
from bench.record import Failure, Record
from bench.slo import Slo
from cpd.common.blocks import BLOCK_SIZE, extend_hashes, hash_root
from engine.types import Finish, Request, SamplingParams
from sim.cluster.router import RequestState
from sim.cluster.workload import Session, Turn, Workload
from sim.events import Events

ROOT = hash_root(b"simulated")


@dataclass(frozen=True, slots=True)
class Window:
    """Arrival times of measured requests, in seconds."""

    start_s: float
    end_s: float

    def __contains__(self, time_s: float) -> bool:
        return self.start_s <= time_s <= self.end_s


@dataclass(eq=False, slots=True)
class _Conversation:
    """A session in progress.

    Attributes:
        token_ids: The last prompt.
        hashes: Hashes of its full blocks; before the first prompt, of the blocks shared with other sessions.
        answer: Tokens of the current answer.
        late: True if the first token is late: the request is already counted as bad.
    """

    number: int
    turns: Sequence[Turn]
    token_ids: "array[int]"
    hashes: list[bytes]
    answer: list[int] = field(default_factory=list)
    turn: int = 0
    record: Record | None = None
    late: bool = False


class Users:
    """Starts sessions when they are due, and sends the next turn after each complete answer.

    Args:
        submit: Sends a request to the cluster.
        window: Arrival times of measured requests.
        slo: Targets of a good request.

    Attributes:
        records: The measured requests.
        unfinished, good, bad: Numbers of measured requests. One is bad as soon as its first token is late.
    """

    def __init__(
        self, workload: Workload, events: Events, submit: Callable[[RequestState], None], window: Window, slo: Slo
    ) -> None:
        self.records: list[Record] = []
        self.unfinished = self.good = self.bad = 0
        self._sessions = workload.sessions()
        self._events = events
        self._submit = submit
        self._window = window
        self._slo = slo
        self._numbers = count()
        self._conversations: dict[int, _Conversation] = {}
        self._shared_prefixes: dict[bytes, list[bytes]] = {}  # packed tokens shared by sessions -> their block hashes

    def next_session(self) -> None:
        """Schedules the workload's next session, which schedules the one after it."""
        session = next(self._sessions, None)
        if session is not None:
            self._events.at(session.start_s, self._begin, session)

    def give_up(self) -> None:
        """Marks requests that are not done as failed."""
        for conversation in self._conversations.values():
            if conversation.record is not None and not conversation.record.ended_s:
                conversation.record.ended_s, conversation.record.error = self._events.now, Failure.TIMEOUT

    def _begin(self, session: Session) -> None:
        self.next_session()
        if session.turns:
            number = next(self._numbers)
            conversation = _Conversation(number, session.turns, array("i"), self._shared_hashes(session))
            self._conversations[number] = conversation
            self._ask(conversation)

    def _shared_hashes(self, session: Session) -> list[bytes]:
        """Returns hashes of the blocks that other sessions share."""
        tokens = session.turns[0].token_ids[: session.shared].tobytes()
        known = self._shared_prefixes.get(tokens)
        if known is None:
            known = self._shared_prefixes[tokens] = extend_hashes(ROOT, tokens)
        return list(known)

    def _ask(self, conversation: _Conversation) -> None:
        """Sends the next turn."""
        turn, now = conversation.turns[conversation.turn], self._events.now
        conversation.token_ids = token_ids = conversation.token_ids[:]
        token_ids.extend(conversation.answer)
        token_ids.extend(turn.token_ids)
        conversation.late = False
        hashes = conversation.hashes
        hashes += extend_hashes(hashes[-1] if hashes else ROOT, token_ids[len(hashes) * BLOCK_SIZE :].tobytes())
        request = Request(
            id=f"{conversation.number}.{conversation.turn}",
            token_ids=token_ids,
            prompt_len=len(token_ids),
            params=SamplingParams(max_tokens=turn.output_len),
            hash_root=ROOT,
            block_hashes=list(hashes),
            received=now,
            deadline=now + self._slo.ttft / 1e3 if self._slo.ttft else float("inf"),
            number=conversation.number,
        )
        state = RequestState(conversation.number, request, self._answered, self._refused)
        conversation.answer = state.token_ids
        conversation.record = Record(
            session=conversation.number,
            turn=conversation.turn,
            input_len=len(token_ids),
            output_len=turn.output_len,
            due_s=now,
            sent_s=now,
            content_s=state.times_s,
            status=200,
            prompt_tokens=len(token_ids),
        )
        if now in self._window:
            self.records.append(conversation.record)
            self.unfinished += 1
            if self._slo.ttft is not None:
                self._events.at(now + self._slo.ttft / 1e3, self._check_first_token, conversation, conversation.record)
        self._submit(state)

    def _check_first_token(self, conversation: _Conversation, record: Record) -> None:
        if conversation.record is record and not record.content_s and not record.ended_s:
            conversation.late = True
            self.bad += 1

    def _answered(self, state: RequestState, finish: Finish) -> None:
        conversation = self._conversations[state.number]
        record = conversation.record
        assert record is not None
        record.finish_reason = "stop" if finish is Finish.STOP else "length"
        record.cached_tokens = state.cached_tokens
        record.output_tokens = len(record.content_s)
        record.route = "remote" if state.remote else "local"
        record.worker = state.decode
        self._end(conversation, record, record.content_s[-1])

    def _refused(self, state: RequestState) -> None:
        conversation = self._conversations[state.number]
        assert conversation.record is not None
        conversation.record.error = "http_429"
        conversation.turns = ()  # the user leaves
        self._end(conversation, conversation.record, self._events.now)

    def _end(self, conversation: _Conversation, record: Record, ended_s: float) -> None:
        record.ended_s = ended_s
        record.answer_s = record.content_s[0] if record.content_s else None
        if record.due_s in self._window:
            self.unfinished -= 1
            if request_row(record, 0.0, self._slo).good:
                self.good += 1
            elif not conversation.late:
                self.bad += 1
        conversation.turn += 1
        if conversation.turn < len(conversation.turns):
            pause_s = conversation.turns[conversation.turn].pause_s
            self._events.at(ended_s + pause_s, self._ask, conversation)
        else:
            del self._conversations[conversation.number]
