"""A device whose requests take given times, for the residency policies' tests. It checks each action."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cpd.residency.bound import longest_wait_s
from cpd.residency.snapshot import (
    Action,
    Device,
    Drain,
    Fail,
    Intent,
    Model,
    ModelState,
    Occupant,
    ResidencyPolicy,
    Sleep,
    Stage,
    Wake,
)
from sim.events import Events


@dataclass(eq=False)
class Request:
    """A request that runs for `seconds`, in pieces if it is parked."""

    seconds: float
    began_s: float = 0.0
    parked: bool = False
    ended_s: float | None = None
    failed: str = ""


@dataclass(eq=False)
class Resident:
    """A model on the device."""

    model: Model
    state: ModelState = ModelState.ASLEEP
    since_s: float = 0.0
    last_access_s: float = 0.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)


class Ledger:
    """Runs a policy on requests, in virtual time.

    Args:
        parks_early: Whether the policy may park requests before `drain_timeout`.

    Attributes:
        log: What was done, and when.
        waits: Time that each intent took, and the time that was promised.
    """

    def __init__(
        self, memory: int, models: Sequence[Model], policy: ResidencyPolicy, *, parks_early: bool = False
    ) -> None:
        self.events = Events()
        self.log: list[tuple[float, Action]] = []
        self.waits: list[tuple[str, float, float]] = []
        self.residents = {one.name: Resident(one) for one in models}
        self.requests: list[Request] = []
        self._memory = memory
        self._models = models
        self._policy = policy
        self._parks_early = parks_early
        self._intents: dict[str, tuple[float, float]] = {}
        self._check = 0

    def run(self, arrivals: Sequence[tuple[float, str, float]]) -> None:
        """Runs requests, each of a time, a model and a number of seconds, until all have ended."""
        for time_s, name, seconds in arrivals:
            request = Request(seconds)
            self.requests.append(request)
            self.events.at(time_s, self._arrive, self.residents[name], request)
        self.events.run(until=lambda: False)

    def did(self, kind: type[Action]) -> list[tuple[float, str]]:
        """Returns the times and models of all actions of a kind."""
        return [(time_s, one.model) for time_s, one in self.log if isinstance(one, kind)]

    def snapshot(self) -> Device:
        """Returns what the policy sees."""
        occupants = [
            Occupant(
                one.model,
                one.state,
                one.since_s,
                one.last_access_s,
                running=len(one.running),
                resumed=sum(request.parked for request in one.running),
                deadlines=[request.began_s + 5 for request in one.running],
                drain_s=5.0,
                arrivals_per_s=0.1,
            )
            for one in self.residents.values()
            if one.state is not ModelState.ASLEEP
        ]
        intents = [
            Intent(
                self.residents[name].model,
                *times,
                deadlines=sorted(times[0] + 10 for _ in self.residents[name].waiting),
                wake_s=self.residents[name].model.wake_s,
            )
            for name, times in self._intents.items()
            if self.residents[name].state is not ModelState.WAKING
        ]
        return Device(self._memory, self._models, occupants, intents)

    def _arrive(self, one: Resident, request: Request) -> None:
        one.last_access_s = self.events.now
        if one.state is ModelState.SERVING:
            self._start(one, request)
        else:
            self._wait(one, request)
            self._decide()

    def _start(self, one: Resident, request: Request) -> None:
        request.began_s = self.events.now
        one.running.append(request)
        self.events.after(request.seconds, self._end, one, request, request.began_s)

    def _end(self, one: Resident, request: Request, began_s: float) -> None:
        if request in one.running and request.began_s == began_s:
            one.running.remove(request)
            request.ended_s = self.events.now
            self._decide()

    def _wait(self, one: Resident, request: Request) -> None:
        now = self.events.now
        one.waiting.append(request)
        if one.model.name not in self._intents and one.state is not ModelState.WAKING:
            self._intents[one.model.name] = now, now
            device = self.snapshot()
            self._intents[one.model.name] = now, now + longest_wait_s(device, device.intents, now)

    def _decide(self) -> None:
        now = self.events.now
        self._check += 1
        for _ in range(100):
            decision = self._policy.decide(self.snapshot(), now)
            actions = [one for one in decision.actions if not isinstance(one, Stage)]
            if not actions:
                break
            for action in actions:
                self._do(action)
                self._check_memory()
        else:
            raise AssertionError(f"the policy never comes to rest: {actions}")
        assert decision.check_at_s > now
        if decision.check_at_s < float("inf"):
            self.events.at(decision.check_at_s, self._ask, self._check)

    def _ask(self, number: int) -> None:
        if number == self._check:
            self._decide()

    def _do(self, action: Action) -> None:
        now, one = self.events.now, self.residents[action.model]
        self.log.append((now, action))
        match action:
            case Wake():
                assert one.state is ModelState.ASLEEP
                assert all(other.state is not ModelState.WAKING for other in self.residents.values()), (
                    "two loads at a time"
                )
                self._enter(one, ModelState.WAKING)
                self.events.after(one.model.wake_s, self._woken, one)
            case Drain():
                assert one.state is ModelState.SERVING
                assert not one.model.fairness.popular, "a popular model is displaced"
                assert now >= one.since_s + one.model.fairness.min_runtime_s, "displaced before its min_runtime"
                assert action.needed_by != action.model
                self._enter(one, ModelState.DRAINING)
            case Sleep():
                assert one.state in (ModelState.SERVING, ModelState.DRAINING)
                if one.running:
                    assert one.state is ModelState.DRAINING
                    assert self._parks_early or now >= one.since_s + one.model.sleep.drain_timeout_s
                parked, one.running = one.running, []
                for request in parked:
                    request.seconds -= now - request.began_s
                    request.parked = True
                    self._wait(one, request)
                self._enter(one, ModelState.SLEEPING)
                self.events.after(one.model.sleep_s, self._asleep, one)
            case Fail():
                self._close(one)
                for request in one.waiting:
                    request.failed = action.reason
                one.waiting.clear()

    def _enter(self, one: Resident, state: ModelState) -> None:
        one.state, one.since_s = state, self.events.now

    def _woken(self, one: Resident) -> None:
        self._close(one)
        self._enter(one, ModelState.SERVING)
        waiting, one.waiting = one.waiting, []
        for request in waiting:
            self._start(one, request)
        self._decide()

    def _asleep(self, one: Resident) -> None:
        self._enter(one, ModelState.ASLEEP)
        self._decide()

    def _close(self, one: Resident) -> None:
        since_s, latest_s = self._intents.pop(one.model.name)
        self.waits.append((one.model.name, self.events.now - since_s, latest_s - since_s))

    def _check_memory(self) -> None:
        taken = sum(one.model.memory_bytes for one in self.residents.values() if one.state is not ModelState.ASLEEP)
        assert taken <= self._memory, "more memory than there is"
