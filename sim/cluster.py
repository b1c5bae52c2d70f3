"""A whole cluster in virtual time: from settings to what became of each request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from bench.metrics import request_row
from bench.record import Record
from bench.slo import Slo
from cpd.blocks import BLOCK_SIZE, extend_hashes, hash_root
from cpd.errors import ConfigError
from cpd.perfmodel import PerfModel, Profile
from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Output, Request, SamplingParams, StepOutput
from router.policy import PolicySettings
from sim.events import Events
from sim.fills import DecodeSide, Links, PrefillSide
from sim.policies import PolicyName, policy
from sim.router import Flight, SimRouter
from sim.settings import ClusterShape
from sim.worker import SimWorker
from sim.workload import Session, Turn, Workload

GRACE_S = 60.0
"""A measured request that isn't done so long after the last one came has failed."""

ROOT = hash_root(b"simulated")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        records: Of the measured requests.
        good: How many of them met both targets.
        stopped: More of them missed the targets than was allowed, so that the run ended early.
        imbalance: Requests on the busiest combined worker, on average over time, to the mean of all.
        passed_s: Virtual time from the first session to the end.
    """

    records: list[Record]
    good: int
    stopped: bool
    imbalance: float
    passed_s: float


@dataclass(eq=False, slots=True)
class _Conversation:
    """A session under way.

    Attributes:
        token_ids: Of the last prompt.
        hashes: Of its full blocks.
        answer: What came back so far.
    """

    number: int
    turns: Sequence[Turn]
    token_ids: list[int]
    hashes: list[bytes]
    answer: list[int] = field(default_factory=list)
    turn: int = 0
    record: Record | None = None


class SimCluster:
    """Workers, a router and whom they serve.

    Args:
        settings: What is simulated.
        name: The policy.
        workload: Whom they serve.
        most_bad: Ends the run when more measured requests than this have missed their targets; None: never.

    Attributes:
        workers: All of them.

    Raises:
        ConfigError: The settings do not fit together, or a file is none.
    """

    def __init__(
        self, settings: ClusterShape, name: PolicyName, workload: Workload, most_bad: int | None = None
    ) -> None:
        self._settings = settings
        self._most_bad = most_bad
        self._slo = Slo(ttft=settings.slo_ttft, itl=settings.slo_itl)
        self._events = Events()
        chosen = policy(name)
        profile = Profile.load(settings.profile)
        model = PerfModel(profile)
        prefill_workers = settings.prefill_workers if chosen.prefill_workers else 0
        if prefill_workers >= settings.workers:
            raise ConfigError(f"of {settings.workers} workers, {prefill_workers} prefill workers leave no combined one")
        num_pages = settings.num_pages or profile.num_pages
        if not num_pages:
            raise ConfigError(f"{settings.profile} does not say how many KV pages there are: give --num-pages")

        def worker(role: str, number: int) -> SimWorker:
            return SimWorker(
                f"{role}-{number}",
                role,
                self._events,
                model,
                colocate=chosen.colocate if role == "combined" else "mixed",
                itl_ms=settings.slo_itl,
                num_pages=num_pages,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_queue_tokens=settings.max_queue_tokens,
            )

        prefill = [worker("prefill", number) for number in range(prefill_workers)]
        combined = [worker("combined", number) for number in range(settings.workers - prefill_workers)]
        self.workers = prefill + combined
        network_s = settings.network_ms / 1e3
        links = Links(self._events, model, profile.page_bytes)
        prefill_sides = {one.id: PrefillSide(one) for one in prefill}
        sides = {one.id: DecodeSide(one, self._events, links, network_s, prefill_sides) for one in combined}
        for one in combined:
            one.on_output = self._see
        self._router = SimRouter(
            chosen.place,
            PolicySettings(settings.slo_ttft, settings.slo_itl, settings.long_prefill_tokens),
            self.workers,
            sides,
            self._events,
            network_s,
            settings.seed,
            self._loaded,
        )
        self._sessions = workload.sessions()
        self._numbers = count()
        self._flights: dict[str, Flight] = {}
        self._conversations: dict[int, _Conversation] = {}
        self._records: list[Record] = []
        self._unfinished = 0
        self._good = self._bad = 0
        self._load_s = {one.id: 0.0 for one in combined}
        self._loads = {one.id: (0.0, 0) for one in combined}

    def run(self) -> Outcome:
        """Simulates until every measured request is done."""
        self._next_session()
        self._events.run(self._over)
        for conversation in self._conversations.values():
            if conversation.record is not None and not conversation.record.ended_s:
                conversation.record.ended_s, conversation.record.error = self._events.now, "timeout"
        mean = sum(self._load_s.values()) / len(self._load_s)
        return Outcome(
            records=self._records,
            good=self._good,
            stopped=self._stopped,
            imbalance=max(self._load_s.values()) / mean if mean else 1.0,
            passed_s=self._events.now,
        )

    # ---- those who are served ----

    @property
    def _last_s(self) -> float:
        return self._settings.warmup + self._settings.duration

    @property
    def _stopped(self) -> bool:
        return self._most_bad is not None and self._bad > self._most_bad

    def _over(self) -> bool:
        now = self._events.now
        return self._stopped or (now > self._last_s and (not self._unfinished or now > self._last_s + GRACE_S))

    def _next_session(self) -> None:
        session = next(self._sessions, None)
        if session is not None:
            self._events.at(session.start_s, self._begin, session)

    def _begin(self, session: Session) -> None:
        self._next_session()
        if session.turns:
            number = next(self._numbers)
            self._conversations[number] = conversation = _Conversation(number, session.turns, [], [])
            self._ask(conversation)

    def _ask(self, conversation: _Conversation) -> None:
        """The next turn is due."""
        turn, now = conversation.turns[conversation.turn], self._events.now
        conversation.token_ids = token_ids = [*conversation.token_ids, *conversation.answer, *turn.token_ids]
        conversation.answer = []
        hashes = conversation.hashes
        hashes += extend_hashes(hashes[-1] if hashes else ROOT, token_ids[len(hashes) * BLOCK_SIZE :])
        request = Request(
            id=f"{conversation.number}.{conversation.turn}",
            token_ids=token_ids,
            prompt_len=len(token_ids),
            params=SamplingParams(max_tokens=turn.output_len),
            hash_root=ROOT,
            block_hashes=list(hashes),
            received=now,
            deadline=now + self._settings.slo_ttft / 1e3,
        )
        conversation.record = Record(
            session=conversation.number,
            turn=conversation.turn,
            input_len=len(token_ids),
            output_len=turn.output_len,
            due_s=now,
            sent_s=now,
            status=200,
            prompt_tokens=len(token_ids),
        )
        if self._settings.warmup <= now <= self._last_s:
            self._records.append(conversation.record)
            self._unfinished += 1
        flight = Flight(conversation.number, request, self._token, self._refused)
        self._flights[request.id] = flight
        self._router.submit(flight)

    # ---- what comes back ----

    def _see(self, output: StepOutput) -> None:
        for one in output.outputs:
            self._router.output(self._flights[one.request_id], one)
        for request_id, reason in output.failed:
            raise AssertionError(f"request {request_id} failed: {reason}")

    def _token(self, flight: Flight, output: Output, after_s: float) -> None:
        conversation = self._conversations[flight.number]
        record = conversation.record
        assert record is not None
        record.content_s.append(self._events.now + after_s)
        conversation.answer.append(output.token_ids[0])
        if output.finish is not None:
            record.finish_reason = "stop" if output.finish is Finish.STOP else "length"
            record.cached_tokens = flight.cached_tokens
            record.output_tokens = len(record.content_s)
            record.route = "remote" if flight.remote else "local"
            self._end(flight, conversation, record, self._events.now + after_s)

    def _refused(self, flight: Flight) -> None:
        conversation = self._conversations[flight.number]
        assert conversation.record is not None
        conversation.record.error = "http_429"
        conversation.turns = ()  # the user gives up
        self._end(flight, conversation, conversation.record, self._events.now)

    def _end(self, flight: Flight, conversation: _Conversation, record: Record, ended_s: float) -> None:
        record.ended_s = ended_s
        record.answer_s = record.content_s[0] if record.content_s else None
        del self._flights[flight.request.id]
        if self._settings.warmup <= record.due_s <= self._last_s:
            self._unfinished -= 1
            if request_row(record, 0.0, self._slo).good:
                self._good += 1
            else:
                self._bad += 1
        conversation.turn += 1
        if conversation.turn < len(conversation.turns):
            pause_s = conversation.turns[conversation.turn].pause_s
            self._events.at(ended_s + pause_s, self._ask, conversation)
        else:
            del self._conversations[conversation.number]

    def _loaded(self, worker: SimWorker, load: pb.Load) -> None:
        """Adds up how many requests a worker has, over the measured time."""
        if worker.id in self._loads and self._settings.warmup <= self._events.now <= self._last_s:
            since_s, requests = self._loads[worker.id]
            self._load_s[worker.id] += requests * (self._events.now - max(since_s, self._settings.warmup))
            self._loads[worker.id] = self._events.now, load.running + load.waiting
