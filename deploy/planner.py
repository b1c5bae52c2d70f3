"""The planner of a running cluster: decides every few seconds how many workers prefill, and changes their roles.
Within bounds, it also decides how many workers there are.

It runs in the launcher (`cpd up --planner act`) or, for clusters without one, as a process of its own (`python -m
deploy.planner`). Of several, the one that has the lease in Redis plans (`cpd/common/planner_lease.py`), and writes a
report there, which routers show. Each round:

    take or renew the lease → ask the admin ports of all routers what arrived, and which workers are ready
    → give workers that have restarted their role back → decide → change roles, or begin to start or end workers
    → write the report

A round that fails changes nothing, says why once, and is repeated. If somebody else changes numbers or roles, the
planner goes on from these. It gives a role back only to a worker that has lost it by a restart. If no combined worker
is left, it makes one.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from secrets import token_hex
from typing import Literal, cast

import orjson
import typer

from cpd.common.errors import ConfigError, CPDError
from cpd.common.logs import setup_logging
from cpd.common.membership import Member, members
from cpd.common.options import command
from cpd.common.planner_lease import PlannerLease, read_plan
from cpd.common.redis_client import NoBackoff, Redis, RedisError, Retry
from cpd.common.settings import ClusterSettings, PlannerSettings, Role
from cpd.common.trust import ClusterSecret, read_secret
from cpd.planner.arrivals import ArrivalFeed
from cpd.planner.capacity import Fleet, Targets
from cpd.planner.load import LoadMeter
from cpd.planner.planner import Plan, Planner
from cpd.planner.report import ChangeReport, GivenRole, LoadClass, PlanReport, PredictionReport, parse_report
from cpd.planner.size import Sizer
from cpd.rpc import cpd_pb2 as pb
from router.operations.peer_routers import PeerRouters
from router.operations.planner_view import PlannedWorker, PlannerView, WorkerPerformance
from router.placement.worker_load import colocation_of
from worker.admin_calls import set_role

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Time between two decisions, in seconds."""

LEASE_S = 30.0
"""Time after which another planner may take over, in seconds. It is renewed in every round and before each change, and
a worker takes at most 10 s to answer."""

STEADY_S = 20.0
"""Time for which no worker may have joined or left before roles change, in seconds: it may just be restarting."""

RETRY_S = 60.0
"""Time after which the planner tries again to change roles, or to start or end workers, in seconds."""

GONE_S = 300.0
"""Time after which a worker that is away does not get its role back, in seconds. If its name comes back after that, it
is probably a new worker."""

SHOWN_CHANGES = 16
"""Number of changes that a report shows: more than there can be in an hour."""

REDIS_TIMEOUT_S = 5.0
"""Time limit for an answer of Redis, in seconds."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many workers a planner may start and leave.

    Attributes:
        resize: Starts or ends workers until there are this many, and returns the names of those that have ended. It
            gets the workers that are ready, those first that may end first. Raises CPDError.
    """

    least: int
    most: int
    resize: Callable[[int, Sequence[str]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class _State:
    """What a planner with the lease knows.

    Attributes:
        feed: What arrives.
        sizer: None if the number of workers stays.
        ready_at: When each worker was ready, the last time.
    """

    feed: ArrivalFeed
    planner: Planner
    sizer: Sizer | None
    ready_at: dict[str, float]


class ClusterPlanner:
    """Plans for a cluster.

    Args:
        mode: `act` changes roles, `advise` only says what it would do.
        secret: The cluster's.
        busy: Held while the planner changes the cluster; whoever else changes it holds it, too.
        say: Shows a sentence to the operator.
        bounds: None: the number of workers stays.
    """

    def __init__(
        self,
        mode: Literal["advise", "act"],
        redis_url: str,
        cluster: str,
        secret: ClusterSecret,
        busy: threading.Lock,
        say: Say,
        bounds: Bounds | None = None,
    ) -> None:
        self._mode = mode
        self._bounds = bounds
        self._redis_url = redis_url
        self._cluster = cluster
        self._secret = secret
        self._busy = busy
        self._say = say
        self._name = f"{socket.gethostname()}:{os.getpid()}:{token_hex(4)}"
        self._problem = ""
        self._unreadable: set[str] = set()  # leases
        self._state: _State | None = None  # None until this planner has the lease
        self._resizing: asyncio.Task[None] | None = None
        self._resized_at = -RETRY_S
        self._refused_at = -RETRY_S  # when no worker took the role that it should get
        self._size_problem = ""
        self._known: frozenset[str] | None = None  # workers
        self._steady_since = 0.0
        self._last: PlanReport = {
            "mode": mode,
            "at": 0.0,
            "workers": 0,
            "current": 0,
            "prefill_workers": 0,
            "reason": "",
            "wanted_workers": 0,
            "size_reason": "",
            "demands": [],
            "scale": 1.0,
            "predictions": [],
            "predicted_at": 0.0,
            "changes": [],
            "changes_total": 0,
            "roles": {},
        }

    async def run(self, ended: threading.Event) -> None:
        """Plans until `ended` is set."""
        async with Redis.from_url(
            self._redis_url,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # the next round tries again
        ) as redis:
            lease = PlannerLease(redis, self._cluster, self._secret, self._name, LEASE_S)
            while not ended.is_set():
                problem = ""
                try:
                    await self._round(redis, lease)
                except CPDError as error:
                    problem = str(error)
                except (RedisError, OSError) as error:
                    problem = f"Redis does not answer: {error}"
                except Exception as error:  # the next round may do better
                    log.exception("the planner failed")
                    problem = f"it failed: {error!r}"
                if problem != self._problem:
                    self._say(f"The planner waits: {problem}" if problem else "The planner plans again")
                self._problem = problem
                await asyncio.to_thread(ended.wait, INTERVAL_S)
            with contextlib.suppress(RedisError, OSError):
                await lease.release()

    async def _round(self, redis: Redis, lease: PlannerLease) -> None:
        """Raises CPDError, RedisError or OSError if nothing can be planned now."""
        if holder := await lease.hold():
            self._state = None
            raise CPDError(f"{holder} plans for this cluster")
        listed = await members(redis, self._cluster, self._secret, self._unreadable)
        views = await self._ask([member for member in listed if member.kind == "router"])
        now = time.monotonic()
        view = max(views, key=lambda one: len(one["workers"]))
        if self._state is None:
            report = parse_report((await read_plan(redis, self._cluster, self._secret))[0])
            self._state = self._take_over(report, view["expected_output"], now)
        state = self._state
        for one in views:
            state.feed.add(one["router"], one["began"], one["arrivals"], now)
        workers = view["workers"]
        if not workers:
            raise CPDError("no worker is ready")
        self._forget_roles(workers, state, now)
        if self._mode == "act" and self._resizing is None:
            await self._restore(workers, lease)
        unsteady = self._unsteady(frozenset(worker["id"] for worker in workers), now)
        plan = _decide(view, state, now, unsteady)
        self._report(plan, state.feed.meter, len(workers), now)
        if plan.changes and self._mode == "act" and now - self._refused_at >= RETRY_S:
            await self._change(plan, workers, lease, state.planner)
        elif not unsteady and plan.current < len(workers):
            self._size(view, state, now)
        if holder := await lease.hold(orjson.dumps(self._last)):
            raise CPDError(f"{holder} plans for this cluster")

    def _take_over(self, report: PlanReport | None, expected_output: int, now: float) -> _State:
        """Begins to measure, and goes on from another planner's report."""
        self._known = None
        if report is not None:
            away = time.time() - report["at"] > GONE_S  # and workers of these names may be others
            self._last.update({"changes": report["changes"], "changes_total": report["changes_total"]})
            self._last["roles"] = {} if away else report["roles"]
        ago = [time.time() - change["at"] for change in self._last["changes"]] if self._mode == "act" else []
        return _State(
            ArrivalFeed(LoadMeter(now, expected_output)),
            Planner(now, [now - seconds for seconds in ago]),
            Sizer(self._bounds.least, self._bounds.most, now) if self._bounds is not None else None,
            dict.fromkeys(self._last["roles"], now),
        )

    def _forget_roles(self, workers: Sequence[PlannedWorker], state: _State, now: float) -> None:
        """Forgets the roles of workers that have been away for too long to be the same."""
        roles = self._last["roles"]
        state.ready_at.update((worker["id"], now) for worker in workers)
        for name in [name for name in roles if now - state.ready_at[name] > GONE_S]:
            del roles[name]

    async def _ask(self, routers: Sequence[Member]) -> list[PlannerView]:
        """Returns the views of the routers that answer.

        Raises:
            CPDError: None does.
        """
        asked = PeerRouters("", lambda: routers).ask("/load", f"Bearer {self._secret.admin_key}".encode())
        answers = await asked
        if any(answer.status == HTTPStatus.CONFLICT for answer in answers):
            raise CPDError("the cluster has several models, and a planner works for one only")
        views: list[PlannerView] = [orjson.loads(answer.body) for answer in answers if answer.ok]
        if not views:
            reasons = [f"{answer.router_id}: {answer.error}" for answer in answers] or ["none is there"]
            raise CPDError(f"no router answers ({'; '.join(reasons)})")
        return views

    def _unsteady(self, known: frozenset[str], now: float) -> str:
        """Returns why nothing should change now; empty if it may."""
        if known != self._known:
            self._steady_since = now if self._known is not None else now - STEADY_S
            self._known = known
        if self._resizing is not None:
            return "the number of workers is changing"
        return "a worker has just joined or left" if now - self._steady_since < STEADY_S else ""

    def _report(self, plan: Plan, meter: LoadMeter, workers: int, now: float) -> None:
        """Puts a decision into the report."""
        advised = self._last["prefill_workers"], self._last["workers"]
        self._last.update(
            {
                "at": time.time(),
                "workers": workers,
                "current": plan.current,
                "prefill_workers": plan.prefill_workers,
                "reason": plan.reason,
                "demands": [cast(LoadClass, asdict(demand)) for demand in meter.demands(now)],
            }
        )
        if plan.predictions:
            predictions = [cast(PredictionReport, asdict(one)) for one in plan.predictions]
            self._last.update({"scale": plan.scale, "predictions": predictions, "predicted_at": time.time()})
        if plan.changes and self._mode == "advise" and (plan.prefill_workers, workers) != advised:
            self._say(
                f"The planner advises that {plan.prefill_workers} of {workers} workers prefill, instead of"
                f" {plan.current}: {plan.reason}"
            )

    def _size(self, view: PlannerView, state: _State, now: float) -> None:
        """Decides how many workers there should be, and begins to start or end some."""
        if self._bounds is None or state.sizer is None:
            return
        fleet, meter = _fleet(view), state.feed.meter
        size = state.sizer.size(meter.demands(now), meter.seen(now), fleet, _targets(view), _prefill_workers(view), now)
        news = size.workers not in (fleet.count, self._last["wanted_workers"])
        self._last.update({"wanted_workers": size.workers, "size_reason": size.reason})
        if news:
            does = "wants" if self._mode == "act" else "advises"
            self._say(f"The planner {does} {size.workers} workers instead of {fleet.count}: {size.reason}")
        if self._mode == "act" and size.workers != fleet.count and now - self._resized_at >= RETRY_S:
            self._resizing = asyncio.create_task(self._resize(self._bounds, size.workers, may_end(view["workers"])))

    async def _resize(self, bounds: Bounds, workers: int, ready: Sequence[str]) -> None:
        """Starts or ends workers. It may take minutes, and rounds go on meanwhile."""
        problem = ""
        try:
            with self._holding() as free:
                if free:
                    for name in await asyncio.to_thread(bounds.resize, workers, ready):
                        self._last["roles"].pop(name, None)
        except CPDError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the planner goes on
            log.exception("the number of workers could not be changed")
            problem = repr(error)
        finally:
            self._resized_at, self._resizing = time.monotonic(), None
        if problem not in ("", self._size_problem):
            self._say(f"The planner could not change the number of workers: {problem}")
        self._size_problem = problem

    async def _change(
        self, plan: Plan, workers: Sequence[PlannedWorker], lease: PlannerLease, planner: Planner
    ) -> None:
        """Changes the roles of as few workers as possible, those with the fewest requests first.

        If somebody else is changing the cluster, or no worker changes its role, it is planned again later.
        """
        role: Role = "prefill" if plan.prefill_workers > plan.current else "combined"
        wanted = abs(plan.prefill_workers - plan.current)
        changed: list[str] = []
        errors: list[str] = []
        with self._holding() as free:
            if not free:
                return
            for worker in in_order(workers, role):
                if len(changed) == wanted:
                    break
                try:
                    await self._set_role(worker, role, lease)
                    changed.append(worker["id"])
                except CPDError as error:
                    errors.append(str(error))
                except (RedisError, OSError) as error:
                    errors.append(f"Redis does not answer: {error}")
                    break
        total, problem = self._last["workers"], "; ".join(errors)
        if len(changed) < wanted:
            self._say(f"The planner wanted {plan.prefill_workers} of {total} to prefill: {problem}")
        if not changed:
            self._refused_at = time.monotonic()
            self._last["reason"] = f"{plan.reason}; no worker changes its role: {problem}"
            return
        planner.changed(time.monotonic())
        present = plan.current + (len(changed) if role == "prefill" else -len(changed))
        change: ChangeReport = {
            "at": time.time(),
            "before": plan.current,
            "after": present,
            "workers": changed,
            "reason": plan.reason,
            "error": problem,
        }
        self._last["changes"] = [*self._last["changes"], change][-SHOWN_CHANGES:]
        self._last["changes_total"] += 1
        self._last["current"] = present
        kind = f"{role} workers" if len(changed) > 1 else f"a {role} worker"
        self._say(f"The planner makes {', '.join(changed)} {kind}: {present} of {total} prefill now ({plan.reason})")

    async def _restore(self, workers: Sequence[PlannedWorker], lease: PlannerLease) -> None:
        """Gives workers that have restarted, with their first role, the role back that they had."""
        roles = self._last["roles"]
        for worker in workers:
            given = roles.get(worker["id"])
            if given is None or given["role"] == worker["role"]:
                continue
            if given["incarnation"] == worker["incarnation"]:
                del roles[worker["id"]]  # somebody changed it by hand
                continue
            if given["role"] == "prefill" and sum(one["role"] == "combined" for one in workers) == 1:
                continue
            with self._holding() as free:
                if not free:
                    return
                try:
                    await self._set_role(worker, cast(Role, given["role"]), lease)
                except CPDError as error:
                    del roles[worker["id"]]  # the next decision goes on from what is there
                    self._say(f"{worker['id']} has restarted and does not become a {given['role']} worker: {error}")
                    continue
            self._say(f"{worker['id']} has restarted; the planner makes it a {given['role']} worker again")

    async def _set_role(self, worker: PlannedWorker, role: Role, lease: PlannerLease) -> None:
        """Raises CPDError if the worker does not change, or another planner has the lease."""
        if holder := await lease.hold():
            raise CPDError(f"{holder} plans for this cluster")
        await asyncio.to_thread(set_role, worker["id"], worker["address"], self._secret.admin_key, role)
        worker["role"] = role
        self._last["roles"][worker["id"]] = GivenRole(role=role, incarnation=worker["incarnation"])

    @contextlib.contextmanager
    def _holding(self) -> Iterator[bool]:
        """Holds `busy` if it is free; returns whether it was."""
        free = self._busy.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._busy.release()


def _decide(view: PlannerView, state: _State, now: float, unsteady: str) -> Plan:
    """Decides how many workers prefill. `unsteady` says why nothing may change; empty if it may."""
    current, meter = _prefill_workers(view), state.feed.meter
    if unsteady:
        return Plan(current, current, unsteady)
    if current == len(view["workers"]):
        return Plan(current - 1, current, "no combined worker is ready")
    return state.planner.plan(meter.demands(now), meter.seen(now), _fleet(view), _targets(view), current, now)


def may_end(workers: Sequence[PlannedWorker]) -> list[str]:
    """Returns the names of the workers, those first that lose the least if they end: prefill ones have no streams.

    Of equal ones the last in `workers`, which are in the order of their names, comes first, as in `cpd scale`.
    """

    def loss(at: int) -> tuple[bool, int, int, int]:
        one = workers[at]
        return one["role"] == "combined", one["requests"], one["cached_pages"], -at

    return [workers[at]["id"] for at in sorted(range(len(workers)), key=loss)]


def in_order(workers: Sequence[PlannedWorker], role: Role) -> list[PlannedWorker]:
    """Returns the workers that could get a role, those first that lose the least by the change."""
    others = [worker for worker in workers if worker["role"] != role]
    return sorted(others, key=lambda one: (one["requests"], one["cached_pages"], one["id"]))


@contextlib.contextmanager
def planning(planner: ClusterPlanner) -> Iterator[None]:
    """Plans, on a thread of its own, while the context is open."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(planner.run(ended)), name="planner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def check_bounds(settings: ClusterSettings) -> None:
    """Checks the bounds of the number of workers.

    Raises:
        ConfigError: They contradict each other or other settings.
    """
    if not settings.max_workers:
        return
    if settings.planner == "off":
        raise ConfigError("--max-workers is for a planner: choose --planner advise or act")
    if settings.simulate:
        raise ConfigError("--max-workers: the number of simulated workers can't change while they run")
    if settings.min_workers > settings.max_workers:
        raise ConfigError(f"--min-workers {settings.min_workers} is more than --max-workers {settings.max_workers}")
    if settings.prefill >= settings.max_workers:
        raise ConfigError(
            f"--prefill {settings.prefill} leaves no combined worker within --max-workers {settings.max_workers}"
        )


def _prefill_workers(view: PlannerView) -> int:
    return sum(worker["role"] == "prefill" for worker in view["workers"])


def _targets(view: PlannerView) -> Targets:
    return Targets(view["slo_ttft"], view["slo_itl"])


def _fleet(view: PlannerView) -> Fleet:
    """The workers, as the planner sees them."""
    shown = view["performance"]
    return Fleet(
        len(view["workers"]),
        [colocation_of(_hello(one), view["slo_itl"]) for one in shown],
        [one["slowdown"] for one in shown],
        shown[0]["max_num_seqs"],
        shown[0]["num_pages"],
    )


def _hello(worker: WorkerPerformance) -> pb.Hello:
    return pb.Hello(
        profile=worker["profile"].encode(),
        token_budget=worker["token_budget"],
        colocate=worker["colocate"],
        decode_shares=worker["decode_shares"],
    )


def run(settings: PlannerSettings) -> None:
    """Plan for a cluster without `cpd up`, until SIGTERM. Of several planners one plans, and the others wait."""
    setup_logging(settings.log_level, settings.log_format, "planner")
    if not settings.redis_url:
        raise ConfigError("--redis-url is needed: Redis is where the planner finds the routers")
    secret = read_secret(settings.secret_file) if settings.secret_file is not None else ClusterSecret("")
    planner = ClusterPlanner(settings.planner, settings.redis_url, settings.cluster, secret, threading.Lock(), log.info)
    ended = threading.Event()

    async def until_signalled() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await planner.run(ended)

    asyncio.run(until_signalled())


def main() -> None:
    """Runs the command line."""
    typer.run(command(PlannerSettings, run))


if __name__ == "__main__":
    main()
