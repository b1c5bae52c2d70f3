"""A whole cluster in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from bench.record import Record
from bench.slo import Slo
from cpd.common.errors import ConfigError
from cpd.performance.model import PerfModel, Profile
from cpd.rpc import cpd_pb2 as pb
from engine.types import StepOutput
from router.placement.policy import Targets
from sim.cluster.disaggregation import DecodeSide, Links, PrefillSide
from sim.cluster.events import Events
from sim.cluster.mistakes import mistaken
from sim.cluster.policies import make_system
from sim.cluster.router import SimRouter
from sim.cluster.settings import ClusterShape
from sim.cluster.users import Users, Window
from sim.cluster.worker import SimWorker
from sim.cluster.workload import Workload
from sim.device.pace import Pace

GRACE_S = 60.0
"""A measured request fails if it is not done this long after the last one arrived."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. An imbalance is the maximum over the workers, divided by their mean.

    Attributes:
        records: The measured requests.
        good: Number of measured requests that met both targets.
        work_imbalance: Imbalance of device time (see `sim/cluster/work.py`).
        imbalance: Imbalance of the time-averaged number of requests on combined workers.
        step_imbalance: Imbalance of the combined workers' time-averaged decode step times; no step counts as 0.
    """

    records: list[Record]
    good: int
    work_imbalance: float
    imbalance: float
    step_imbalance: float


class SimCluster:
    """Workers, a router and users.

    Args:
        believed: Returns the profile by which a worker predicts, from its name and the one it would have otherwise.

    Attributes:
        workers: All workers.

    Raises:
        ConfigError: The settings contradict each other, or a file is invalid.
    """

    def __init__(
        self,
        settings: ClusterShape,
        workload: Workload,
        believed: Callable[[str, Profile], Profile] = lambda _, profile: profile,
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

        def worker(role: str, number: int) -> SimWorker:
            name = f"{role}-{number}"
            pace = Pace(settings.step_noise, settings.drift, rng.randrange(1 << 32))
            return SimWorker(
                name,
                role,
                self._events,
                model,
                pace,
                PerfModel(believed(name, mistaken(predicted, settings.profile_error, rng))),
                colocate=system.colocate if role == "combined" else "mixed",
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
            system.policy(settings.policy),
            Targets(settings.slo_ttft, settings.slo_itl, settings.long_prefill_tokens),
            self.workers,
            _decode_sides(prefill, combined, self._events, model, network_s),
            self._events,
            network_s,
            settings.seed,
            self._loads.reported,
            settings.max_tokens,
            settings.policy,
        )
        for one in combined:
            one.on_output = self._on_output
            one.on_run = self._on_run
        slo = Slo(ttft=settings.slo_ttft, itl=settings.slo_itl)
        self._users = Users(workload, self._events, self._router.submit, self._window, slo)
        self._users.next_session()

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
    def _all_arrived(self) -> bool:
        return self._events.now > self._window.end_s

    def _over(self) -> bool:
        return self._all_arrived and (not self._users.unfinished or self._events.now > self._window.end_s + GRACE_S)

    def _on_output(self, output: StepOutput) -> None:
        """Passes the tokens of a combined worker's step on."""
        for one in output.outputs:
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


class _Loads:
    """The workers' device time and load reports in the measured time."""

    def __init__(self, workers: Sequence[SimWorker], events: Events, window: Window) -> None:
        self._events = events
        self._window = window
        self._work_s: list[list[float]] = []  # by worker, at start and end
        for time_s in (window.start_s, window.end_s):
            events.at(time_s, lambda: self._work_s.append([one.device_s for one in workers]))
        combined = [one for one in workers if one.role == "combined"]
        self._reports: dict[str, list[tuple[float, pb.Load]]] = {one.id: [(0.0, pb.Load())] for one in combined}

    def reported(self, worker: SimWorker, load: pb.Load) -> None:
        """Records a load report."""
        now = self._events.now
        if worker.id in self._reports and now in self._window:
            self._reports[worker.id].append((now, load))

    def work_imbalance(self) -> float:
        """See `Outcome`."""
        start_s, end_s = self._work_s
        return _imbalance([after - before for before, after in zip(start_s, end_s, strict=True)])

    def imbalance(self, figure: Callable[[pb.Load], float]) -> float:
        """Returns the imbalance of a figure's time averages."""
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
