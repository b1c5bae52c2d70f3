"""All workers of a model, with one session each.

Redis lists the workers that exist (`roster.py`); the session with a worker shows whether it can be used. A worker that
is no longer listed is kept until its session ends.
"""

import asyncio
import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.membership import Member
from cpd.common.tls import without_fingerprint
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.worker_session import Listener, RefusedError, WorkerSession
from router.events import Events
from router.placement.candidate import Candidate
from router.placement.learning import Learning
from router.placement.worker_load import Residency
from router.prefix_index.index import PrefixIndex

log = logging.getLogger(__name__)

SILENT_S = 3.0
"""A worker that sent nothing for this long, in seconds, is stopped or cut off: workers send something every second."""

SWEEP_S = 0.5
"""Interval at which the index is cleared of lost workers, in seconds."""

SWEEP_PAUSE_S = 0.01
"""Pause while the index is cleared of lost workers, after every millisecond of work; in seconds."""

BEST_FIRST: Sequence[Residency] = ("serving", "waking", "draining", "asleep")

ROLES = {"prefill": pb.ROLE_PREFILL, "combined": pb.ROLE_COMBINED}


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """The model that the connected workers serve, from their Hellos.

    Attributes:
        fingerprint: Hash of weights and dtype; empty if no worker is connected.
        max_model_len: Longest prompt plus output, in tokens, that half of the combined workers take; 0 if there are
            none.
        vocab_size: Size of the vocabulary; 0 if no worker is connected.
    """

    fingerprint: bytes
    max_model_len: int
    vocab_size: int


class Workers:
    """The workers of one model that this router knows.

    Args:
        router_id: This router's name.
        secret: The cluster's secret.
        model_name: The name that their leases must have; empty, if the cluster has one model, for any.
        model_digest: Of this router's model; empty admits workers with any.
        itl_ms: Target for the gaps between the tokens of a stream, in ms.
        learning: What this router learns from requests.

    Attributes:
        router_id: This router's name.
        model_name: See above.
        index: The cached blocks of the workers.
        events: What has happened to them lately.
    """

    def __init__(
        self,
        router_id: str,
        secret: ClusterSecret,
        *,
        model_name: str = "",
        model_digest: bytes = b"",
        itl_ms: float,
        learning: Learning,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.index = PrefixIndex()
        self.events = Events()
        self.router_id = router_id
        self.model_name = model_name
        self._secret = secret
        self._model_digest = model_digest
        self._itl_ms = itl_ms
        self.learning = learning
        self._sessions: dict[str, WorkerSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._awaited: list[WorkerSession] | None = None
        self._model: ClusterModel | None = None  # None after a Hello has changed

    @property
    def sessions(self) -> Sequence[WorkerSession]:
        """The sessions of all known workers, by name. May be read on any thread."""
        return sorted(self._sessions.copy().values(), key=lambda session: session.id)

    @property
    def settled(self) -> bool:
        """True once each worker that was listed when this router started has either sent its cache snapshot or failed
        to."""
        if self._awaited is None:
            return False
        while self._awaited and self._awaited[-1].settled:
            self._awaited.pop()
        return not self._awaited

    @property
    def ready(self) -> bool:
        """True if it is settled and a worker takes requests."""
        return self.settled and any(session.may_serve for session in self._sessions.values())

    @property
    def residency(self) -> Residency | None:
        """State of the model on the worker that can serve requests first; None if no worker takes any.

        May be read on any thread.
        """
        states = {session.residency for session in _takers(self.sessions)}
        return next((state for state in BEST_FIRST if state in states), None)

    @property
    def model(self) -> ClusterModel:
        """The model of the connected workers."""
        if self._model is None:
            hellos = [(session.role, session.hello) for session in self._sessions.values() if session.hello is not None]
            combined = [hello.max_model_len for role, hello in hellos if role == "combined"]
            self._model = ClusterModel(
                fingerprint=next((hello.fingerprint for _, hello in hellos), b""),
                max_model_len=median_low(combined or [hello.max_model_len for _, hello in hellos] or [0]),
                vocab_size=next((hello.vocab_size for _, hello in hellos), 0),
            )
        return self._model

    @property
    def without_grammars(self) -> set[str]:
        """The workers that can't constrain outputs, by grammars or thinking budgets."""
        return {
            session.id for session in self._sessions.values() if session.hello is None or not session.hello.grammars
        }

    @property
    def any_with_grammars(self) -> bool:
        """True if a worker that takes requests can constrain outputs."""
        unable = self.without_grammars
        return any(session.id not in unable for session in _takers(self._sessions.values()))

    def get(self, worker_id: str) -> WorkerSession:
        """The session with a worker that `candidates` returned."""
        return self._sessions[worker_id]

    def candidates(self, role: str, tokens: int, exclude: Container[str] = ()) -> list[Candidate]:
        """The live workers of a role, except `exclude`, that take `tokens` tokens of prompt and output. Silent workers
        are returned only if there are no others."""
        of_role = [session for session in self._sessions.values() if session.role == role and session.live]
        return self._candidates(of_role, tokens, exclude)

    def takers(self, tokens: int, exclude: Container[str] = ()) -> list[Candidate]:
        """The workers that take requests, as `candidates` returns them: the combined ones, or, while none of these is
        live, the prefill workers."""
        return self._candidates(_takers(self._sessions.values()), tokens, exclude)

    def _candidates(self, sessions: Iterable[WorkerSession], tokens: int, exclude: Container[str]) -> list[Candidate]:
        """Those of the workers, except `exclude`, that take `tokens` tokens; silent ones if there are no others."""
        silent_since = self._loop.time() - SILENT_S
        heard: list[Candidate] = []
        silent: list[Candidate] = []
        for session in sessions:
            load = session.worker_load
            if session.id not in exclude and load is not None and load.max_model_len >= tokens:
                (silent if session.heard_at < silent_since else heard).append(load.candidate)
        return heard or silent

    async def sweep(self) -> None:
        """Clears the index of workers that are gone, until cancelled."""
        while True:
            more = self.index.sweep()
            await asyncio.sleep(SWEEP_PAUSE_S if more else SWEEP_S)

    async def close(self, listener: Listener) -> None:
        """Closes all sessions."""
        for worker_id in list(self._sessions):
            await self._close(worker_id, listener)

    async def follow(self, listed: Mapping[str, Member], listener: Listener) -> None:
        """Opens and closes sessions, so that there is one with each of the workers that are listed, by name."""
        for worker_id, session in list(self._sessions.items()):
            replaced = worker_id in listed and listed[worker_id] != session.member
            gone = worker_id not in listed and not session.connected
            if replaced or gone:
                log.info("%s worker %s is %s", session.role, worker_id, "a new process" if replaced else "gone")
                await self._close(worker_id, listener)
        for worker_id in listed.keys() - self._sessions.keys():
            session = WorkerSession(
                listed[worker_id],
                router_id=self.router_id,
                secret=self._secret,
                index=self.index,
                itl_ms=self._itl_ms,
                learning=self.learning,
                events=self.events,
                admit=self._admit,
                on_hello=self._on_hello,
            )
            self._sessions[worker_id] = session
            self._tasks[worker_id] = asyncio.create_task(session.run(listener), name=f"session-{worker_id}")
        if self._awaited is None:
            self._awaited = list(self._sessions.values())

    async def _close(self, worker_id: str, listener: Listener) -> None:
        session, task = self._sessions.pop(worker_id), self._tasks.pop(worker_id)
        self._on_hello()
        task.cancel()
        await asyncio.wait((task,))
        session.close(listener)

    def _admit(self, member: Member, hello: pb.Hello) -> None:
        """Raises RefusedError if a worker does not fit this cluster or the workers that are connected."""
        if hello.worker_id != member.id:
            raise RefusedError(
                f"the worker at {without_fingerprint(member.address)} is {hello.worker_id!r}, not {member.id!r}"
            )
        if self.model_name and member.model != self.model_name:
            serves = f"names the model {member.model!r}" if member.model else "names no model"
            raise RefusedError(
                f"its lease {serves}, and this router has none of that name; start it with --served-model-name"
            )
        if hello.role != ROLES[member.kind]:
            role = pb.Role.Name(hello.role) if hello.role in pb.Role.values() else hello.role
            raise RefusedError(f"its lease has the role {member.kind!r}, but its Hello {role}")
        if not (hello.fingerprint and hello.epoch and hello.num_pages and hello.max_model_len and hello.vocab_size):
            raise RefusedError("its Hello lacks epoch, num_pages, max_model_len, vocab_size or fingerprint")
        if hello.block_size != BLOCK_SIZE:
            raise RefusedError(f"it has blocks of {hello.block_size} tokens, this router {BLOCK_SIZE}")
        if self._model_digest and hello.model_digest not in (b"", self._model_digest):
            raise RefusedError(
                f"its config.json, tokenizer or chat template ({hello.model_digest.hex()[:16]}) differ from this "
                f"router's ({self._model_digest.hex()[:16]}); start both with the same --model"
            )
        model = self.model
        if model.fingerprint not in (b"", hello.fingerprint):
            raise RefusedError(
                f"it serves another model or dtype (fingerprint {hello.fingerprint.hex()[:16]}) than the other workers "
                f"({model.fingerprint.hex()[:16]}); start all workers with the same --model, --dtype, "
                "--quantization and --kv-dtype"
            )
        if model.vocab_size not in (0, hello.vocab_size):
            raise RefusedError(f"its vocabulary has {hello.vocab_size} tokens, the other workers' {model.vocab_size}")

    def _on_hello(self) -> None:
        self._model = None


def _takers(sessions: Collection[WorkerSession]) -> list[WorkerSession]:
    """Those of the workers that take requests."""
    combined = [session for session in sessions if session.role == "combined" and session.live]
    return combined or [session for session in sessions if session.may_serve]
