"""A whole cluster in virtual time: from settings to what became of each request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.record import Record
from bench.slo import Slo
from cpd.common.errors import ConfigError
from cpd.performance.model import PerfModel, Profile
from cpd.rpc import cpd_pb2 as pb
from engine.types import StepOutput
from router.placement.costs import PolicySettings
from sim.cluster.events import Events
from sim.cluster.fills import DecodeSide, Links, PrefillSide
from sim.cluster.policies import PolicyName, policy
from sim.cluster.router import SimRouter
from sim.cluster.settings import ClusterShape
from sim.cluster.users import Users, Window
from sim.cluster.worker import SimWorker
from sim.cluster.workload import Workload

GRACE_S = 60.0
"""A measured request that isn't done so long after the last one came has failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        records: Of the measured requests.
        good: How many of them met both targets.
        work_imbalance: Device time of what the worker with most computed (see `sim/cluster/work.py`), to the mean of
            all.
        imbalance: Requests on the combined worker with most, on average over time, to their mean.
        step_imbalance: The same of how long their decode steps take; none takes no time.
    """

    records: list[Record]
    good: int
    work_imbalance: float
    imbalance: float
    step_imbalance: float


class SimCluster:
    """Workers, a router and whom they serve.

    Args:
        settings: What is simulated.
        name: The policy.
        workload: Whom they serve.

    Attributes:
        workers: All of them.

    Raises:
        ConfigError: The settings do not fit together, or a file is none.
    """

    def __init__(self, settings: ClusterShape, name: PolicyName, workload: Workload) -> None:
        self._events = Events()
        self._window = Window(settings.warmup, settings.warmup + settings.duration)
        chosen = policy(name)
        model = PerfModel(Profile.load(settings.profile))
        prefill_workers = settings.prefill_workers if chosen.prefill_workers else 0
        if prefill_workers >= settings.workers:
            raise ConfigError(f"of {settings.workers} workers, {prefill_workers} prefill workers leave no combined one")
        num_pages = settings.num_pages or model.profile.num_pages
        if not num_pages:
            raise ConfigError(f"{settings.profile} does not say how many KV pages there are: give --num-pages")

        def worker(role: str, number: int) -> SimWorker:
            return SimWorker(
                f"{role}-{number}",
                role,
                self._events,
                model,
                colocate=chosen.colocate if role == "combined" else "mixed",
                token_budget=settings.token_budget,
                itl_ms=settings.slo_itl,
                num_pages=num_pages,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_queue_tokens=settings.max_queue_tokens,
            )

        prefill = [worker("prefill", number) for number in range(prefill_workers)]
        combined = [worker("combined", number) for number in range(settings.workers - prefill_workers)]
        self.workers = prefill + combined
        self._loads = _Loads(self.workers, self._events, self._window)
        network_s = settings.network_ms / 1e3
        self._router = SimRouter(
            chosen.place,
            PolicySettings(settings.slo_ttft, settings.slo_itl, settings.long_prefill_tokens),
            self.workers,
            _decode_sides(prefill, combined, self._events, model, network_s),
            self._events,
            network_s,
            settings.seed,
            self._loads.reported,
        )
        for one in combined:
            one.on_output = self._see
            one.on_run = self._see_run
        slo = Slo(ttft=settings.slo_ttft, itl=settings.slo_itl)
        self._users = Users(workload, self._events, self._router.submit, self._window, slo)
        self._users.next_session()

    def sustains(self, share: float, expected: float) -> bool:
        """Simulates until it is certain whether this share of the measured requests meet both targets.

        `run` goes on from there.

        Args:
            expected: Measured requests to come, about.
        """
        users = self._users

        def passes() -> bool:
            return self._all_came and users.good >= share * len(users.records)

        def fails() -> bool:
            measured = len(users.records)
            return users.bad > (1 - share) * (measured if self._all_came else max(measured, expected))

        self._events.run(lambda: passes() or fails() or self._over())
        return users.good >= share * len(users.records)

    def run(self) -> Outcome:
        """Simulates until every measured request is done."""
        self._events.run(self._over)
        self._users.give_up()
        return Outcome(
            records=self._users.records,
            good=self._users.good,
            work_imbalance=self._loads.work_imbalance(),
            imbalance=self._loads.imbalance(lambda load: load.running + load.waiting),
            step_imbalance=self._loads.imbalance(lambda load: load.step_ms),
        )

    @property
    def _all_came(self) -> bool:
        return self._events.now > self._window.end_s

    def _over(self) -> bool:
        return self._all_came and (not self._users.unfinished or self._events.now > self._window.end_s + GRACE_S)

    def _see(self, output: StepOutput) -> None:
        """What a combined worker's step brought."""
        for one in output.outputs:
            self._router.output(one)
        for request_id, reason in output.failed:
            raise AssertionError(f"request {request_id} failed: {reason}")

    def _see_run(self, step: StepOutput, ends_s: Sequence[float]) -> None:
        """What several steps of a combined worker brought."""
        for output in step.outputs:
            if output.finish is None:
                self._router.more(output.request_id, output.token_ids, ends_s)
                continue
            self._router.more(output.request_id, output.token_ids[:-1], ends_s[:-1])
            self._router.output(replace(output, token_ids=output.token_ids[-1:]))


class _Loads:
    """What the workers do in the measured time, and what the combined ones report of it."""

    def __init__(self, workers: Sequence[SimWorker], events: Events, window: Window) -> None:
        self._events = events
        self._window = window
        self._work_s: list[list[float]] = []  # of each worker, at the measured time's start and end
        for time_s in (window.start_s, window.end_s):
            events.at(time_s, lambda: self._work_s.append([one.device_s for one in workers]))
        combined = [one for one in workers if one.role == "combined"]
        self._reports: dict[str, list[tuple[float, pb.Load]]] = {one.id: [(0.0, pb.Load())] for one in combined}

    def reported(self, worker: SimWorker, load: pb.Load) -> None:
        """A worker has sent its load."""
        now = self._events.now
        if worker.id in self._reports and now in self._window:
            self._reports[worker.id].append((now, load))

    def work_imbalance(self) -> float:
        """See `Outcome`."""
        start_s, end_s = self._work_s
        return _imbalance([after - before for before, after in zip(start_s, end_s, strict=True)])

    def imbalance(self, figure: Callable[[pb.Load], float]) -> float:
        """The largest of a figure's averages over time, to their mean."""
        sums = [
            sum(
                figure(load) * (until_s - max(since_s, self._window.start_s))
                for (since_s, load), (until_s, _) in pairwise(reports)
            )
            for reports in self._reports.values()
        ]
        return _imbalance(sums)


def _imbalance(figures: Sequence[float]) -> float:
    mean = sum(figures) / len(figures)
    return max(figures) / mean if mean else 1.0


def _decode_sides(
    prefill: Sequence[SimWorker], combined: Sequence[SimWorker], events: Events, model: PerfModel, network_s: float
) -> dict[str, DecodeSide]:
    links = Links(events, model, model.profile.page_bytes)
    prefill_sides = {one.id: PrefillSide(one) for one in prefill}
    return {one.id: DecodeSide(one, events, links, network_s, prefill_sides) for one in combined}
