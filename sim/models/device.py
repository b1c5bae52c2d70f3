"""A simulated device with its ledger: who is awake, who waits, and the wake lock.

The device asks the policy at each change and whenever the policy wants to be asked again, and does what it answers at
once. Models that have requests share the device's time equally.

A wake takes `wake_fixed_s` plus the time to load the weights: staged ones at `staged_gb_s`, others at `load_gb_s`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp

from cpd.residency.bound import longest_wait_s
from cpd.residency.snapshot import (
    Action,
    Device,
    Drain,
    Fail,
    Intent,
    ModelState,
    Occupant,
    ResidencyPolicy,
    Sleep,
    Stage,
    Wake,
)
from sim.events import Events
from sim.models.engine import FluidEngine, Request
from sim.models.fleet import SimulatedModel
from sim.models.settings import ModelsSettings

_MEMORY_S = 60.0
"""Time over which a model's recent arrivals are averaged."""

_EXPECTED_OUTPUT = 300.0
"""Output length by which the end of running requests is predicted; the true ones are not known."""


@dataclass(eq=False, slots=True)
class _Resident:
    """A model on the device.

    Attributes:
        since_s: When the state began.
        waiting: Requests that wait until it serves.
        intent_s: When its intent was written, and until when it was promised to serve; None: it has none.
        staged_bytes: Weights that are staged.
    """

    model: SimulatedModel
    engine: FluidEngine
    state: ModelState = ModelState.ASLEEP
    since_s: float = 0.0
    last_access_s: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    intent_s: tuple[float, float] | None = None
    staged_bytes: float = 0.0
    arrivals: float = 0.0  # recent ones, each with less weight as it grows old
    arrivals_at_s: float = 0.0

    def arrivals_per_s(self, now: float) -> float:
        """Returns recent requests a second."""
        return self.arrivals * exp((self.arrivals_at_s - now) / _MEMORY_S) / _MEMORY_S


class SimDevice:
    """A device and its models.

    Args:
        ended: Called with each request that has ended or failed.

    Attributes:
        wakes: Number of wakes so far.
        intents: Time each intent took until the model served or failed, and the time that was promised.
    """

    def __init__(
        self,
        settings: ModelsSettings,
        models: list[tuple[SimulatedModel, FluidEngine]],
        policy: ResidencyPolicy,
        events: Events,
        ended: Callable[[str, Request], None],
    ) -> None:
        self.wakes = 0
        self.intents: list[tuple[float, float]] = []
        self._settings = settings
        self._policy = policy
        self._events = events
        self._ended = ended
        self._residents = {model.spec.name: _Resident(model, engine) for model, engine in models}
        self._specs = [model.spec for model, _ in models]
        self._order: list[_Resident] = []  # those with an intent, in the order in which they wrote it
        self._advanced_s = 0.0
        self._progress = 0  # number of the newest event for a prompt or stream that ends
        self._check = 0  # number of the newest event that asks the policy
        self._staging: str | None = None

    def submit(self, name: str, request: Request) -> None:
        """A request arrives."""
        now = self._events.now
        resident = self._residents[name]
        resident.arrivals = resident.arrivals_per_s(now) * _MEMORY_S + 1
        resident.arrivals_at_s = resident.last_access_s = now
        if resident.state is ModelState.SERVING:
            self._advance()
            resident.engine.add(request)
            self._schedule()
        else:
            self._wait(resident, request)
            self.decide()

    def decide(self) -> None:
        """Asks the policy until it has nothing more to do now."""
        now = self._events.now
        self._check += 1
        while True:
            decision = self._policy.decide(self._snapshot(), now)
            actions = [one for one in decision.actions if not self._is_done(one)]
            if not actions:
                break
            for action in actions:
                self._do(action)
        if decision.check_at_s < float("inf"):
            self._events.at(max(now, decision.check_at_s), self._ask, self._check)

    def _ask(self, number: int) -> None:
        if number == self._check:
            self._advance()
            self.decide()

    def _snapshot(self) -> Device:
        now, settings = self._events.now, self._settings
        busy = sum(len(one.engine) > 0 for one in self._residents.values())
        occupants = [
            Occupant(
                one.model.spec,
                one.state,
                one.since_s,
                one.last_access_s,
                len(one.engine),
                one.engine.resumed,
                one.engine.deadlines(settings.slo_ttft / 1e3, settings.slo_itl / 1e3),
                one.engine.drain_s(1 / max(1, busy), _EXPECTED_OUTPUT),
                one.arrivals_per_s(now),
            )
            for one in self._residents.values()
            if one.state is not ModelState.ASLEEP
        ]
        intents = [
            Intent(one.model.spec, *one.intent_s, self._deadlines(one), self._wake_s(one))
            for one in self._order
            if one.intent_s is not None and one.state is not ModelState.WAKING
        ]
        return Device(settings.device_memory, self._specs, occupants, intents)

    def _deadlines(self, resident: _Resident) -> list[float]:
        """Returns until when each waiting request still meets its target."""
        settings = self._settings
        return sorted(
            one.due_s + settings.slo_ttft / 1e3
            if one.first_s is None
            else one.first_s + one.tokens * settings.slo_itl / 1e3
            for one in resident.waiting
        )

    def _wake_s(self, resident: _Resident) -> float:
        settings = self._settings
        plain = resident.model.weights_bytes - resident.staged_bytes
        load_s = plain / (settings.load_gb_s * 1e9) + resident.staged_bytes / (settings.staged_gb_s * 1e9)
        kv_tokens = sum(one.kv_tokens for one in resident.waiting)
        return settings.wake_fixed_s + load_s + self._kv_s(resident, kv_tokens)

    def _kv_s(self, resident: _Resident, tokens: int) -> float:
        """Returns the time to copy KV pages from or to host memory."""
        return min(tokens * resident.model.kv_token_bytes, resident.model.kv_bytes) / (self._settings.load_gb_s * 1e9)

    def _is_done(self, action: Action) -> bool:
        """Whether there is nothing to do, because the action was said before."""
        return isinstance(action, Stage) and (
            self._staging is not None or self._residents[action.model].staged_bytes > 0
        )

    def _do(self, action: Action) -> None:
        resident = self._residents[action.model]
        match action:
            case Wake():
                self.wakes += 1
                self._enter(resident, ModelState.WAKING)
                self._events.after(self._wake_s(resident), self._woken, resident)
            case Drain():
                self._enter(resident, ModelState.DRAINING)
            case Sleep():
                self._advance()
                parked = resident.engine.park(self._settings.parked_kv == "copy")
                for request in parked:
                    self._wait(resident, request)
                self._enter(resident, ModelState.SLEEPING)
                kv_s = self._kv_s(resident, sum(one.kv_tokens for one in parked))
                self._events.after(self._settings.sleep_s + kv_s, self._asleep, resident)
                self._schedule()
            case Stage():
                self._staging = action.model
                seconds = resident.model.weights_bytes / (self._settings.stage_gb_s * 1e9)
                self._events.after(seconds, self._staged, resident)
            case Fail():
                self._close_intent(resident)
                for request in resident.waiting:
                    request.failed = True
                    self._ended(action.model, request)
                resident.waiting.clear()

    def _enter(self, resident: _Resident, state: ModelState) -> None:
        resident.state, resident.since_s = state, self._events.now

    def _wait(self, resident: _Resident, request: Request) -> None:
        """A request waits until its model serves; the first one writes an intent."""
        now = self._events.now
        request.waiting_since_s = now
        resident.waiting.append(request)
        if resident.intent_s is None and resident.state is not ModelState.WAKING:
            self._order.append(resident)
            resident.intent_s = now, now
            snapshot = self._snapshot()
            resident.intent_s = now, now + longest_wait_s(snapshot, snapshot.intents, now)

    def _close_intent(self, resident: _Resident) -> None:
        if resident.intent_s is not None:
            since_s, latest_s = resident.intent_s
            self.intents.append((self._events.now - since_s, latest_s - since_s))
            resident.intent_s = None
            self._order.remove(resident)

    def _woken(self, resident: _Resident) -> None:
        now = self._events.now
        self._advance()
        self._close_intent(resident)
        self._enter(resident, ModelState.SERVING)
        resident.staged_bytes = 0.0
        for request in resident.waiting:
            if request.waiting_since_s is not None:
                request.waited_s += now - request.waiting_since_s
                request.waiting_since_s = None
            resident.engine.add(request)
        resident.waiting.clear()
        self._schedule()
        self.decide()

    def _asleep(self, resident: _Resident) -> None:
        self._enter(resident, ModelState.ASLEEP)
        self.decide()

    def _staged(self, resident: _Resident) -> None:
        self._staging = None
        if resident.state is not ModelState.WAKING:
            resident.staged_bytes = resident.model.weights_bytes
        self.decide()

    def _busy(self) -> list[_Resident]:
        return [one for one in self._residents.values() if len(one.engine)]

    def _advance(self) -> None:
        """Brings all engines to the present."""
        now = self._events.now
        busy = self._busy()
        for one in busy:
            one.engine.advance(now - self._advanced_s, 1 / len(busy))
        self._advanced_s = now

    def _schedule(self) -> None:
        """Schedules the next end of a prompt or stream."""
        self._progress += 1
        busy = self._busy()
        next_s = min((one.engine.next_s(1 / len(busy)) for one in busy), default=float("inf"))
        if next_s < float("inf"):
            self._events.after(next_s, self._ends, self._progress)

    def _ends(self, number: int) -> None:
        if number != self._progress:
            return
        now = self._events.now
        self._advance()
        ask = False
        for one in self._busy():
            for request in one.engine.collect(now):
                request.ended_s = now
                self._ended(one.model.spec.name, request)
            ask = ask or not len(one.engine)
        self._schedule()
        if ask:
            self.decide()
