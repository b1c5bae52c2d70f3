"""All workers of the cluster: found in Redis, one session each.

Redis says who exists; whether a worker can be used is known from the session with it. While Redis is away, everything
goes on with the workers known last. A worker that is no longer listed stays as long as its session does.
"""

import asyncio
import contextlib
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cpd.blocks import BLOCK_SIZE
from cpd.membership import Member, members
from cpd.rpc import cpd_pb2 as pb
from router.candidate import Candidate
from router.errors import describe
from router.index import PrefixIndex
from router.sessions import Listener, RefusedError, Session

log = logging.getLogger(__name__)

POLL_S = 0.5

MOST_PAGES = 1 << 24
"""Of one worker: bounds what is kept of its cache."""

SWEEP_PAUSE_S = 0.01
"""Between two pieces of clearing up after workers that are gone, of about a millisecond each."""

_ROLES = {"prefill": pb.ROLE_PREFILL, "combined": pb.ROLE_COMBINED}


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What the Hellos of all connected workers come to."""

    fingerprint: bytes
    max_model_len: int
    vocab_size: int


class Workers:
    """The workers that this router knows.

    Args:
        router_id: This router's name.
        cluster_token: Secret that every internal call carries.
        itl_ms: What the gaps between the tokens of a stream are to be, in ms.

    Attributes:
        router_id: This router's name.
        index: What the workers have cached.
        routers: The live routers, this one included.
        looked: Set when Redis has been asked who exists, whether it answered or not.
        redis_error: Why Redis does not answer; empty while it does.
    """

    def __init__(self, router_id: str, cluster_token: str, *, itl_ms: float) -> None:
        self.index = PrefixIndex()
        self.routers: list[Member] = []
        self.looked = asyncio.Event()
        self.redis_error = ""
        self.router_id = router_id
        self._cluster_token = cluster_token
        self._itl_ms = itl_ms
        self._sessions: dict[str, Session] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._awaited: list[Session] | None = None
        self._agreed: _Agreed | None = None  # None: to be found out

    @property
    def sessions(self) -> Sequence[Session]:
        """Every known worker's session, by name. May be read on any thread."""
        return sorted(self._sessions.copy().values(), key=lambda session: session.id)

    @property
    def ready(self) -> bool:
        """Requests can be served: a combined worker is live, and what the workers have cached is known.

        That is, of each worker that was listed when this router started: from its snapshot, or it could not be reached.
        """
        if self._awaited is None:
            return False
        while self._awaited and self._awaited[-1].settled:
            self._awaited.pop()
        return not self._awaited and any(
            session.live for session in self._sessions.values() if session.role == "combined"
        )

    @property
    def fingerprint(self) -> bytes:
        """Of the model that the connected workers serve; empty when there are none."""
        return self._agree().fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens: what at least half of the combined workers can take; 0 when there are
        none."""
        return self._agree().max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; 0 when there are no workers."""
        return self._agree().vocab_size

    def get(self, worker_id: str) -> Session:
        """The session with a worker that `candidates` named."""
        return self._sessions[worker_id]

    def candidates(self, role: str, tokens: int, but: Container[str] = ()) -> list[Candidate]:
        """The live workers of a role that can take prompt and output of so many tokens together, without those named;
        silent ones only where there are no others."""
        now = asyncio.get_running_loop().time()
        heard: list[Candidate] = []
        silent: list[Candidate] = []
        for session in self._sessions.values():
            if session.role == role and session.live and session.id not in but:
                view = session.view
                if view is not None and view.max_model_len >= tokens:
                    (silent if session.silent(now) else heard).append(view.candidate)
        return heard or silent

    async def run(self, redis: Redis, cluster: str, listener: Listener, ended: asyncio.Event) -> None:
        """Follows the cluster's membership until `ended` is set; then closes all sessions."""
        # not until cancelled: a cancel can get lost in the Redis client's own timeouts
        sweeper = asyncio.create_task(self._sweep(), name="sweep-index")
        try:
            while not ended.is_set():
                await self._poll(redis, cluster, listener)
                self.looked.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await ended.wait()
        finally:
            sweeper.cancel()
            for worker_id in list(self._sessions):
                await self._close(worker_id, listener)

    async def _sweep(self) -> None:
        """Clears up after workers that are gone, for ever."""
        while True:
            more = self.index.sweep()
            await asyncio.sleep(SWEEP_PAUSE_S if more else POLL_S)

    async def _poll(self, redis: Redis, cluster: str, listener: Listener) -> None:
        try:
            listed = await members(redis, cluster)
        except (RedisError, OSError, TimeoutError) as error:
            if not self.redis_error:
                log.warning("Redis is away, going on with what is known: %s", describe(error))
            self.redis_error = describe(error)
            return
        if self.redis_error:
            log.info("Redis answers again")
        self.redis_error = ""
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
            session = Session(
                listed[worker_id],
                router_id=self.router_id,
                cluster_token=self._cluster_token,
                index=self.index,
                itl_ms=self._itl_ms,
                admit=self._admit,
                greeted=self._look_again,
            )
            self._sessions[worker_id] = session
            self._tasks[worker_id] = asyncio.create_task(session.run(listener), name=f"session-{worker_id}")
        if self._awaited is None:
            self._awaited = list(self._sessions.values())

    async def _close(self, worker_id: str, listener: Listener) -> None:
        session, task = self._sessions.pop(worker_id), self._tasks.pop(worker_id)
        self._look_again()
        task.cancel()
        await asyncio.wait((task,))
        session.close(listener)

    def _admit(self, member: Member, hello: pb.Hello) -> None:
        """Raises RefusedError where a worker can't be used together with the ones that are connected."""
        if hello.worker_id != member.id:
            raise RefusedError(f"the worker at {member.address} is {hello.worker_id!r}, not {member.id!r}")
        if hello.role != _ROLES[member.kind]:
            role = pb.Role.Name(hello.role) if hello.role in pb.Role.values() else hello.role
            raise RefusedError(f"its lease says {member.kind!r}, but its session {role}")
        if not (hello.fingerprint and hello.epoch and hello.num_pages and hello.max_model_len and hello.vocab_size):
            raise RefusedError("it did not say its epoch, num_pages, max_model_len, vocab_size and fingerprint")
        pages = hello.num_pages + hello.host_pages
        if pages > MOST_PAGES:
            raise RefusedError(f"it has {pages} pages, and this router keeps track of {MOST_PAGES} at most")
        if hello.block_size != BLOCK_SIZE:
            raise RefusedError(f"it has blocks of {hello.block_size} tokens, this router {BLOCK_SIZE}")
        if self.fingerprint not in (b"", hello.fingerprint):
            raise RefusedError(
                f"it serves another model or dtype (fingerprint {hello.fingerprint.hex()[:16]}) than the other workers "
                f"({self.fingerprint.hex()[:16]}); start all workers with the same --model and --dtype"
            )
        if self.vocab_size not in (0, hello.vocab_size):
            raise RefusedError(f"it has a vocabulary of {hello.vocab_size} tokens, the other workers {self.vocab_size}")

    def _agree(self) -> _Agreed:
        """Asked several times a request; the Hellos are looked through when one has come or gone."""
        if self._agreed is None:
            hellos = [(session.role, session.hello) for session in self._sessions.values() if session.hello is not None]
            self._agreed = _Agreed(
                fingerprint=next((hello.fingerprint for _, hello in hellos), b""),
                max_model_len=median_low([hello.max_model_len for role, hello in hellos if role == "combined"] or [0]),
                vocab_size=next((hello.vocab_size for _, hello in hellos), 0),
            )
        return self._agreed

    def _look_again(self) -> None:
        self._agreed = None
