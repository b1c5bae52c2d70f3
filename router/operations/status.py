"""The document of `GET /cluster`."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar, cast

import orjson
from typing_extensions import TypedDict

from cpd.common.membership import Member
from cpd.common.scaling import ScalingReport
from cpd.planner.report import PlanReport
from cpd.rpc import cpd_pb2 as pb
from router.dispatch.roster import Roster
from router.dispatch.worker_session import WorkerSession
from router.dispatch.workers import Workers
from router.events import Event
from router.operations.peer_routers import PeerAnswer
from router.operations.worker_metrics import pages
from router.placement.decisions import Decisions
from router.placement.worker_load import Residency

T = TypeVar("T")

WORKERS_AT_ONCE = 25
"""Workers described before the event loop's other tasks run: about half a millisecond."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that this router serves: its names in the API, its workers, and the recent placements there."""

    name: str
    aliases: Sequence[str]
    workers: Workers
    decisions: Decisions


class RouterView(TypedDict):
    """A worker as one router sees it.

    `sequences` counts this router's sequences there. From its first tokens the router has learned that its
    predicted prefills must be multiplied by `ttft_factor`, and that `overhead_ms` is added to each TTFT. Those of a
    worker without requests were learned from prompts that were alone.
    """

    state: str
    reason: str | None
    cached_blocks: int
    sequences: int
    ttft_factor: float
    overhead_ms: float


class WorkerInfo(TypedDict):
    """A worker's description of itself, from the start of the session."""

    fingerprint: str
    epoch: int
    dtype: str
    device: str
    transport: str
    transport_reason: str | None
    block_size: int
    num_pages: int
    page_bytes: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    token_budget: int
    colocate: str | None


class HostMemory(TypedDict):
    """The evicted pages in a worker's host memory."""

    pages: int
    offloaded: int
    blocks: dict[str, int]


class WorkerLoad(TypedDict):
    """A worker's last load report. `pages` counts the KV pool's pages by owner state."""

    running: int
    waiting: int
    waiting_tokens: int
    decodes: int
    prefill_ms: float
    overdue_ms: float
    step_ms: float
    slowdown: float
    pages: dict[str, int]
    preemptions: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    remote_prefills: dict[str, int]
    prefix_fetches: dict[str, int]
    transfer_failures: dict[str, int]
    host: HostMemory


class WorkerResidency(TypedDict):
    """Whether the model of a worker is on its device, which is shared (docs/models.md).

    `serves_in_s`: it serves after this time at the latest, as promised; 0: it serves, or was not asked to. `pinned`: no
    other model may displace it. `since`: when its state began, as far as the routers have seen, in seconds since 1970.
    """

    state: Residency
    serves_in_s: float
    pinned: bool
    since: float


class WorkerStatus(TypedDict):
    """A worker. `state`, `reason` and `cached_blocks` are the answering router's; `routers` has all routers' views.

    `model` is the name of its model; empty if it does not say, in a cluster of several models.
    `residency` is null if its device is not shared.
    """

    id: str
    model: str
    role: str
    address: str
    session: str
    host: str
    pid: int
    incarnation: int
    state: str
    reason: str | None
    cached_blocks: int
    routers: dict[str, RouterView]
    residency: WorkerResidency | None
    info: WorkerInfo | None
    load: WorkerLoad | None


class RouterStatus(TypedDict):
    """A router's lease, and whether it is ready. `error` is the reason why it did not answer.

    `trusted`: its predictions are mostly right; otherwise requests go to the most cached worker. None: not known.
    """

    id: str
    kind: str
    address: str
    host: str
    pid: int
    incarnation: int
    admin: str
    session: str
    ready: bool
    trusted: bool | None
    error: str | None


class RedisStatus(TypedDict):
    """Whether Redis answers."""

    ok: bool
    error: str | None


class ModelStatus(TypedDict):
    """A model that is served. `ready`: a worker takes its requests. `state` as in `GET /v1/models`. `trusted` as in the
    cluster's state."""

    name: str
    aliases: list[str]
    ready: bool
    state: Residency | None
    trusted: bool
    max_model_len: int | None


class Waiting(TypedDict):
    """Requests that wait for their first token, by the workers chosen for them.

    `prefill` is empty if `decode` computes the prompts, and `prefix_source` if no prefix is fetched.
    """

    decode: str
    prefill: str
    prefix_source: str
    requests: int


class RouterEvent(Event):
    """Something that happened to a worker, as a router saw it."""

    router: str


class ClusterStatus(TypedDict):
    """The state of the cluster.

    `model` and `max_model_len` are those of the first of the `models`. `ready`: the router takes requests for one of
    them. `trusted`: the
    predictions for all of them are mostly right.

    `plan` is the last decision of the planner; null without one in the last hour. `planner` says whether one is alive.

    `scaling` is what `cpd up` says about numbers of processes; null without one.

    `waiting` has the requests without a first token. `events` has what has happened to workers lately, oldest first.
    """

    cluster: str
    model: str
    ready: bool
    trusted: bool
    max_model_len: int | None
    models: list[ModelStatus]
    redis: RedisStatus
    workers: list[WorkerStatus]
    routers: list[RouterStatus]
    planner: bool
    plan: PlanReport | None
    scaling: ScalingReport | None
    waiting: list[Waiting]
    events: list[RouterEvent]


async def cluster_status(roster: Roster, models: Sequence[Served], cluster: str, *, ready: bool) -> ClusterStatus:
    """Returns the cluster as this router, which is `ready` or not, sees it. Other tasks run in between."""
    described = [model_status(one) for one in models]
    workers: list[WorkerStatus] = []
    for one in models:
        for session in one.workers.sessions:
            workers.append(_worker(session, roster.router_id, one))
            if len(workers) % WORKERS_AT_ONCE == 0:
                await asyncio.sleep(0)
    return {
        "cluster": cluster,
        "model": described[0]["name"],
        "ready": ready,
        "trusted": all(one["trusted"] for one in described),
        "max_model_len": described[0]["max_model_len"],
        "models": described,
        "redis": {"ok": not roster.redis_error, "error": roster.redis_error or None},
        "workers": sorted(workers, key=lambda one: one["id"]),
        "routers": [_router(member) for member in roster.routers],
        "planner": roster.plans,
        "plan": roster.plan,
        "scaling": roster.scaling,
        "waiting": _waiting(models),
        "events": _events(roster.router_id, models),
    }


def model_status(served: Served) -> ModelStatus:
    """Returns the state of a model."""
    workers = served.workers
    return {
        "name": served.name,
        "aliases": list(served.aliases),
        "ready": workers.ready,
        "state": workers.residency,
        "trusted": workers.learning.trusted,
        "max_model_len": workers.model.max_model_len or None,
    }


def _router(member: Member) -> RouterStatus:
    described = asdict(member)
    del described["model"]
    return cast(RouterStatus, described | {"ready": False, "trusted": None, "error": None})


def _waiting(models: Sequence[Served]) -> list[Waiting]:
    ways = [way for one in models for way in one.decisions.on_the_way().items()]
    return [
        {"decode": decode, "prefill": prefill, "prefix_source": source, "requests": requests}
        for (prefill, decode, source), requests in ways
    ]


def _events(router_id: str, models: Sequence[Served]) -> list[RouterEvent]:
    return _in_order([{**event, "router": router_id} for one in models for event in one.workers.events.latest()])


def _in_order(events: Iterable[RouterEvent]) -> list[RouterEvent]:
    return sorted(events, key=lambda event: event["at"])


def views_in(answers: Sequence[PeerAnswer]) -> tuple[dict[str, ClusterStatus], dict[str, str]]:
    """Returns what other routers see, and why the rest did not answer, by router."""
    seen: dict[str, ClusterStatus] = {one.router_id: orjson.loads(one.body) for one in answers if one.ok}
    return seen, {one.router_id: one.error for one in answers if not one.ok}


def with_peers(
    own: ClusterStatus, router_id: str, peers: Mapping[str, ClusterStatus], errors: Mapping[str, str]
) -> ClusterStatus:
    """Merges what the other routers see into `own`.

    Args:
        peers, errors: See `views_in`.
    """
    seen = {**peers, router_id: own}
    workers = {worker["id"]: worker for worker in own["workers"]}
    for status in peers.values():
        for worker in status["workers"]:
            if worker["id"] not in workers:
                workers[worker["id"]] = {**worker, "routers": {}}
            known = workers[worker["id"]]
            known["routers"].update(worker["routers"])
            known["residency"] = _since_earlier(known.get("residency"), worker.get("residency"))
    for router in own["routers"]:
        router["ready"] = router["id"] in seen and seen[router["id"]]["ready"]
        router["trusted"] = seen[router["id"]]["trusted"] if router["id"] in seen else None
        router["error"] = errors.get(router["id"])
    own["workers"] = [workers[worker_id] for worker_id in sorted(workers)]
    views = [own, *peers.values()]  # a router of an older version tells neither
    own["waiting"] = [way for view in views for way in view.get("waiting", [])]
    own["events"] = _in_order([event for view in views for event in view.get("events", [])])
    return own


def _since_earlier(known: WorkerResidency | None, other: WorkerResidency | None) -> WorkerResidency | None:
    """A router that saw the change knows better since when than one that started later. Older ones do not say it."""
    if known is None or other is None or known["state"] != other["state"]:
        return known
    return {**known, "since": min(known["since"], other["since"])}


def _worker(session: WorkerSession, router_id: str, served: Served) -> WorkerStatus:
    cached_blocks = served.workers.index.size(session.id)
    hello, view, load = session.hello, session.worker_load, session.load
    info: WorkerInfo | None = None
    report: WorkerLoad | None = None
    if hello is not None:
        info = _fields(WorkerInfo, hello)
        info["fingerprint"] = hello.fingerprint.hex()
        info["transport_reason"] = hello.transport_reason or None
        info["colocate"] = hello.colocate or None
        if view is not None:
            info["token_budget"] = view.candidate.token_budget
        report = _fields(WorkerLoad, load)
        report["pages"] = pages(load)
        report["remote_prefills"], report["prefix_fetches"] = dict(load.remote_prefills), dict(load.prefix_fetches)
        report["transfer_failures"] = dict(load.transfer_failures)
        report["host"] = {
            "pages": load.host_pages,
            "offloaded": load.host_offloaded_pages,
            "blocks": dict(load.host_blocks),
        }
    own: RouterView = {
        "state": session.state,
        "reason": session.reason or None,
        "cached_blocks": cached_blocks,
        "sequences": view.sequences if view is not None else 0,
        "ttft_factor": view.candidate.ttft_factor if view is not None else 1.0,
        "overhead_ms": view.candidate.overhead_ms if view is not None else 0.0,
    }
    member = session.member
    return {
        "id": session.id,
        "model": member.model if served.workers.model_name else served.name,
        "role": session.role,
        "address": member.address,
        "session": member.session,
        "host": member.host,
        "pid": member.pid,
        "incarnation": member.incarnation,
        "state": own["state"],
        "reason": own["reason"],
        "cached_blocks": cached_blocks,
        "routers": {router_id: own},
        "residency": _residency(session),
        "info": info,
        "load": report,
    }


def _residency(session: WorkerSession) -> WorkerResidency | None:
    if not session.shared:
        return None
    told = session.load.residency
    return {
        "state": session.residency,
        "serves_in_s": told.serves_in_s,
        "pinned": told.pinned,
        "since": session.residency_since,
    }


def _fields(kind: type[T], message: pb.Hello | pb.Load) -> T:
    """Returns the fields of `kind` that the message has under the same name."""
    values = {name: getattr(message, name) for name in kind.__annotations__ if hasattr(message, name)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    return cast(T, plain)
