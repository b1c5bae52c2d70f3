"""All workers of the cluster, with one session each.

Redis lists the workers that exist; the session with a worker shows whether it can be used. While Redis is down, the
router keeps the workers it knows. A worker that is no longer listed is kept until its session ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.membership import Member, members
from cpd.common.planner_lease import read_plan
from cpd.common.tls import without_fingerprint
from cpd.common.trust import ClusterSecret
from cpd.planner.report import PlanReport, parse_report
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.worker_session import Listener, RefusedError, WorkerSession
from router.errors import describe
from router.placement.candidate import Candidate
from router.placement.learning import Learning
from router.prefix_index.index import PrefixIndex

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval at which Redis is asked for the workers, in seconds."""

SWEEP_PAUSE_S = 0.01
"""Pause while the index is cleared of lost workers, after every millisecond of work; in seconds."""

_ROLES = {"prefill": pb.ROLE_PREFILL, "combined": pb.ROLE_COMBINED}


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
    """The workers that this router knows.

    Args:
        router_id: This router's name.
        secret: The cluster's secret.
        model_digest: Of this router's model; empty admits workers with any.
        itl_ms: Target for the gaps between the tokens of a stream, in ms.
        learning: What this router learns from requests.

    Attributes:
        router_id: This router's name.
        index: The cached blocks of the workers.
        routers: The live routers, this one included.
        polled: Set after the first attempt to ask Redis for the workers, even if it failed.
        redis_error: Reason why Redis does not answer; empty if it does.
        plan: The planner's last decision; None if there was no planner within the last hour.
        plans: Whether a planner is alive.
    """

    def __init__(
        self,
        router_id: str,
        secret: ClusterSecret,
        *,
        model_digest: bytes = b"",
        itl_ms: float,
        learning: Learning,
    ) -> None:
        self.index = PrefixIndex()
        self.routers: list[Member] = []
        self.polled = asyncio.Event()
        self.redis_error = ""
        self.plan: PlanReport | None = None
        self.plans = False
        self._unreadable: set[str] = set()  # leases
        self.router_id = router_id
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
    def ready(self) -> bool:
        """True if a worker takes requests, and each worker that was listed when this router started has either sent its
        cache snapshot or failed to."""
        if self._awaited is None:
            return False
        while self._awaited and self._awaited[-1].settled:
            self._awaited.pop()
        return not self._awaited and any(self._takers())

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
        """The workers that can't constrain outputs to grammars."""
        return {
            session.id for session in self._sessions.values() if session.hello is None or not session.hello.grammars
        }

    @property
    def any_with_grammars(self) -> bool:
        """True if a worker that takes requests can constrain outputs to grammars."""
        unable = self.without_grammars
        return any(session.id not in unable for session in self._takers())

    def get(self, worker_id: str) -> WorkerSession:
        """The session with a worker that `candidates` returned."""
        return self._sessions[worker_id]

    def candidates(self, role: str, tokens: int, exclude: Container[str] = ()) -> list[Candidate]:
        """The live workers of a role, except `exclude`, that take `tokens` tokens of prompt and output. Silent workers
        are returned only if there are no others."""
        of_role = [session for session in self._sessions.values() if session.live and session.role == role]
        return _candidates(of_role, tokens, exclude)

    def takers(self, tokens: int, exclude: Container[str] = ()) -> list[Candidate]:
        """The workers that take requests, as `candidates` returns them: the combined ones, or, while none of these is
        live, the prefill workers."""
        return _candidates(self._takers(), tokens, exclude)

    def _takers(self) -> list[WorkerSession]:
        live = [session for session in self._sessions.values() if session.live]
        combined = [session for session in live if session.role == "combined"]
        return combined or [session for session in live if session.takes_any]

    async def run(self, redis: Redis, cluster: str, listener: Listener, ended: asyncio.Event) -> None:
        """Follows the cluster's membership until `ended` is set; then closes all sessions."""
        # an event, because the Redis client's own timeouts can swallow a cancellation
        sweeper = asyncio.create_task(self._sweep(), name="sweep-index")
        try:
            while not ended.is_set():
                await self._poll(redis, cluster, listener)
                self.polled.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await ended.wait()
        finally:
            sweeper.cancel()
            for worker_id in list(self._sessions):
                await self._close(worker_id, listener)

    async def _sweep(self) -> None:
        """Clears the index of workers that are gone, until cancelled."""
        while True:
            more = self.index.sweep()
            await asyncio.sleep(SWEEP_PAUSE_S if more else POLL_S)

    async def _poll(self, redis: Redis, cluster: str, listener: Listener) -> None:
        try:
            listed = await members(redis, cluster, self._secret, self._unreadable)
            plan, self.plans = await read_plan(redis, cluster, self._secret)
        except (RedisError, OSError, TimeoutError) as error:
            if not self.redis_error:
                log.warning("Redis does not answer; keeping the known workers: %s", describe(error))
            self.redis_error = describe(error)
            return
        if self.redis_error:
            log.info("Redis answers again")
        self.redis_error = ""
        self.plan = parse_report(plan)
        self.routers = sorted((member for member in listed if member.kind == "router"), key=lambda one: one.id)
        await self._follow({member.id: member for member in listed if member.kind in _ROLES}, listener)

    async def _follow(self, listed: Mapping[str, Member], listener: Listener) -> None:
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
        if hello.role != _ROLES[member.kind]:
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
                f"({model.fingerprint.hex()[:16]}); start all workers with the same --model and --dtype"
            )
        if model.vocab_size not in (0, hello.vocab_size):
            raise RefusedError(f"its vocabulary has {hello.vocab_size} tokens, the other workers' {model.vocab_size}")

    def _on_hello(self) -> None:
        self._model = None


def _candidates(sessions: Sequence[WorkerSession], tokens: int, exclude: Container[str]) -> list[Candidate]:
    """Those of the workers, except `exclude`, that take `tokens` tokens; silent ones if there are no others."""
    now = asyncio.get_running_loop().time()
    heard: list[Candidate] = []
    silent: list[Candidate] = []
    for session in sessions:
        load = session.worker_load
        if session.id not in exclude and load is not None and load.max_model_len >= tokens:
            (silent if session.silent(now) else heard).append(load.candidate)
    return heard or silent
