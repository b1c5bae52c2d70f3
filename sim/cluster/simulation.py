"""A whole cluster in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from random import Random

from bench.record import Record
from bench.slo import Slo
from cpd.common.errors import ConfigError
from cpd.performance.model import PerfModel, Profile
from cpd.planner.capacity import Targets as PlanTargets
from cpd.planner.planner import Plan, Planner
from cpd.rpc import cpd_pb2 as pb
from engine.types import StepOutput
from router.placement.policy import Targets
from sim.cluster.disaggregation import DecodeSide, Links, PrefillSide
from sim.cluster.mistakes import mistaken
from sim.cluster.policies import make_system
from sim.cluster.router import SimRouter
from sim.cluster.settings import ClusterShape
from sim.cluster.users import Users, Window
from sim.cluster.worker import Role, SimWorker
from sim.cluster.workload import Workload
from sim.device.pace import Pace
from sim.events import Events

PLAN_INTERVAL_S = 5.0
"""Time between two decisions of a planner."""

GRACE_S = 60.0
"""A measured request fails if it is not done this long after the last one arrived."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. An imbalance is the maximum over the workers, divided by their mean.

    Attributes:
        records: The measured requests.
        good: Number of measured requests that met both targets.
        work_imbalance: Imbalance of device time (see `sim/cluster/work.py`).
        imbalance: Imbalance of the time-averaged number of requests on workers while they are combined.
        step_imbalance: Imbalance of their time-averaged decode step times; no step counts as 0.
        changes: The planner's changes of roles, and their times in seconds.
    """

    records: list[Record]
    good: int
    work_imbalance: float
    imbalance: float
    step_imbalance: float
    changes: list[tuple[float, Plan]]


class SimCluster:
    """Workers, a router and users.

    Args:
        believed: Returns the profile by which a worker predicts, from its name and the one it would have otherwise.
        schedule: Times in seconds, and how many prefill workers there are from each of them on.

    Attributes:
        workers: All workers.
        plans: The planner's decisions so far, and when it took them.

    Raises:
        ConfigError: The settings contradict each other, or a file is invalid.
    """

    def __init__(
        self,
        settings: ClusterShape,
        workload: Workload,
        believed: Callable[[str, Profile], Profile] = lambda _, profile: profile,
        schedule: Sequence[tuple[float, int]] = (),
    ) -> None:
        self._events = Events()
        self._window = Window(settings.warmup, settings.warmup + settings.duration)
        system = make_system(settings.policy)
        truth = Profile.load(settings.profile)
        model = PerfModel(truth)
        predicted = Profile.load(settings.predict_profile) if settings.predict_profile else truth
        rng = Random(settings.seed)
        prefill_workers = settings.prefill_workers if system.prefill_workers else 0
        if prefill_workers >= settings.workers:
            raise ConfigError(f"of {settings.workers} workers, {prefill_workers} prefill workers leave no combined one")
        if settings.policy.name == "static-pd" and not prefill_workers:
            raise ConfigError("static-pd needs prefill workers")
        num_pages = settings.num_pages or model.profile.num_pages
        if not num_pages:
            raise ConfigError(f"{settings.profile} does not say how many KV pages there are: give --num-pages")

        def worker(role: Role, number: int) -> SimWorker:
            name = f"worker-{number}"
            pace = Pace(settings.step_noise, settings.drift, rng.randrange(1 << 32))
            return SimWorker(
                name,
                role,
                self._events,
                model,
                pace,
                PerfModel(believed(name, mistaken(predicted, settings.profile_error, rng))),
                colocate=system.colocate,
                token_budget=settings.token_budget,
                itl_ms=settings.slo_itl,
                num_pages=num_pages,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_queue_tokens=settings.max_queue_tokens,
            )

        roles: list[Role] = ["prefill"] * prefill_workers
        roles += ["combined"] * (settings.workers - prefill_workers)
        self.workers = [worker(role, number) for number, role in enumerate(roles)]
        self._loads = _Loads(self.workers, self._events, self._window)
        network_s = settings.network_ms / 1e3
        links = Links(self._events, model, model.profile.page_bytes)
        self._prefill_sides = {one.id: PrefillSide(one) for one in self.workers}
        self._router = SimRouter(
            system.policy(settings.policy),
            Targets(settings.slo_ttft, settings.slo_itl, settings.long_prefill_tokens),
            self.workers,
            {one.id: DecodeSide(one, self._events, links, network_s, self._prefill_sides) for one in self.workers},
            self._events,
            network_s,
            settings.seed,
            self._loads.reported,
            settings.max_tokens,
            settings.policy,
        )
        for one in self.workers:
            one.on_output = partial(self._on_output, self._prefill_sides[one.id])
            one.on_run = self._on_run
        slo = Slo(ttft=settings.slo_ttft, itl=settings.slo_itl)
        self._users = Users(workload, self._events, self._router.submit, self._window, slo)
        self._users.next_session()
        for time_s, count in schedule:
            self._events.at(time_s, self.set_prefill_workers, count)
        self.plans: list[tuple[float, Plan]] = []
        if settings.planner == "act" and system.prefill_workers:
            self._planner, self._plan_targets = Planner(began=0.0), PlanTargets(settings.slo_ttft, settings.slo_itl)
            self._events.at(PLAN_INTERVAL_S, self._plan)

    def set_prefill_workers(self, count: int) -> None:
        """Changes the roles of as few workers as possible, those with the fewest requests first."""
        prefill = [one for one in self.workers if one.role == "prefill"]
        combined = [one for one in self.workers if one.role == "combined"]
        if not 0 <= count < len(self.workers):
            raise ValueError(f"{count} of {len(self.workers)} workers can't be prefill workers")
        change = count - len(prefill)
        for one in nsmallest(abs(change), combined if change > 0 else prefill, key=self._router.requests_on):
            self.set_role(one, "prefill" if change > 0 else "combined")

    def set_role(self, worker: SimWorker, role: Role) -> None:
        """Changes a worker's role. The router sees it at once; requests on the worker end there."""
        if worker.role != role:
            self._loads.role_changes(worker, role)
            worker.role = role
            self._router.role_changed(worker)

    def _plan(self) -> None:
        """Lets the planner decide, and does what it says."""
        now, meter = self._events.now, self._router.meter
        current = sum(one.role == "prefill" for one in self.workers)
        fleet, targets = self._router.fleet(), self._plan_targets
        plan = self._planner.plan(meter.demands(now), meter.seen(now), fleet, targets, current, now)
        self.plans.append((now, plan))
        if plan.changes:
            self.set_prefill_workers(plan.prefill_workers)
            self._planner.changed(now)
        self._events.after(PLAN_INTERVAL_S, self._plan)

    def sustains(self, share: float, expected: float) -> bool:
        """Simulates until it is certain whether this share of the measured requests meets both targets.

        `run` continues from there.

        Args:
            expected: Expected number of measured requests.
        """
        users = self._users

        def passes() -> bool:
            return self._all_arrived and users.good >= share * len(users.records)

        def fails() -> bool:
            measured = len(users.records)
            return users.bad > (1 - share) * (measured if self._all_arrived else max(measured, expected))

        self._events.run(lambda: passes() or fails() or self._over())
        return users.good >= share * len(users.records)

    def judge(self) -> int:
        """Simulates until every measured request is good or bad, and returns how many are good.

        A request is bad as soon as its first token is late, so this takes less time than `run`.
        """
        users = self._users
        self._events.run(lambda: (self._all_arrived and users.good + users.bad == len(users.records)) or self._over())
        return users.good

    def run(self) -> Outcome:
        """Simulates until every measured request is done."""
        self._events.run(self._over)
        self._users.give_up()
        requests, steps = self._loads.imbalances()
        return Outcome(
            records=self._users.records,
            good=self._users.good,
            work_imbalance=self._loads.work_imbalance(),
            imbalance=requests,
            step_imbalance=steps,
            changes=self.changes,
        )

    @property
    def records(self) -> list[Record]:
        """The measured requests so far."""
        return self._users.records

    @property
    def changes(self) -> list[tuple[float, Plan]]:
        """The planner's changes of roles so far, and their times in seconds."""
        return [(time_s, plan) for time_s, plan in self.plans if plan.changes]

    @property
    def _all_arrived(self) -> bool:
        return self._events.now > self._window.end_s

    def _over(self) -> bool:
        return self._all_arrived and (not self._users.unfinished or self._events.now > self._window.end_s + GRACE_S)

    def _on_output(self, side: PrefillSide, output: StepOutput) -> None:
        """Passes the tokens of a worker's step on."""
        for one in side.take_outputs(output):
            self._router.output(one)
        for request_id, reason in output.failed:
            raise AssertionError(f"request {request_id} failed: {reason}")

    def _on_run(self, step: StepOutput, ends_s: Sequence[float]) -> None:
        """Passes the tokens of several steps on."""
        for output in step.outputs:
            if output.finish is None:
                self._router.more(output.request_id, output.token_ids, ends_s)
                continue
            self._router.more(output.request_id, output.token_ids[:-1], ends_s[:-1])
            self._router.output(replace(output, token_ids=output.token_ids[-1:]))


@dataclass(slots=True)
class _Average:
    """Time averages of a worker's load while it is combined.

    Attributes:
        since_s: Time of its last report or change of role.
        load: The last report; None while it is a prefill worker.
        combined_s: Seconds of the measured time in which it was combined.
        requests_s, step_ms_s: Integrals over them.
    """

    since_s: float
    load: pb.Load | None
    combined_s: float = 0.0
    requests_s: float = 0.0
    step_ms_s: float = 0.0


class _Loads:
    """The workers' device time and load reports in the measured time."""

    def __init__(self, workers: Sequence[SimWorker], events: Events, window: Window) -> None:
        self._events = events
        self._window = window
        self._work_s: list[list[float]] = []  # by worker, at start and end
        for time_s in (window.start_s, window.end_s):
            events.at(time_s, lambda: self._work_s.append([one.device_s for one in workers]))
        self._averages = {one.id: _Average(0.0, pb.Load() if one.role == "combined" else None) for one in workers}

    def reported(self, worker: SimWorker, load: pb.Load) -> None:
        """Records a load report."""
        if worker.role == "combined":
            self._advance(worker.id, load)

    def role_changes(self, worker: SimWorker, role: Role) -> None:
        """A worker gets another role. It counts as empty until its next report."""
        self._advance(worker.id, pb.Load() if role == "combined" else None)

    def work_imbalance(self) -> float:
        """See `Outcome`."""
        start_s, end_s = self._work_s
        return _imbalance([after - before for before, after in zip(start_s, end_s, strict=True)])

    def imbalances(self) -> tuple[float, float]:
        """Returns the imbalances of requests and of decode step times."""
        for worker_id, average in self._averages.items():
            self._advance(worker_id, average.load)
        combined = [one for one in self._averages.values() if one.combined_s]
        return (
            _imbalance([one.requests_s / one.combined_s for one in combined]),
            _imbalance([one.step_ms_s / one.combined_s for one in combined]),
        )

    def _advance(self, worker_id: str, load: pb.Load | None) -> None:
        """Ends the time of a worker's last report."""
        average, now = self._averages[worker_id], self._events.now
        seconds = min(now, self._window.end_s) - max(average.since_s, self._window.start_s)
        if average.load is not None and seconds > 0:
            average.combined_s += seconds
            average.requests_s += seconds * (average.load.running + average.load.waiting)
            average.step_ms_s += seconds * average.load.step_ms
        average.since_s, average.load = now, load


def _imbalance(figures: Sequence[float]) -> float:
    mean = sum(figures) / max(1, len(figures))
    return max(figures) / mean if mean else 1.0
