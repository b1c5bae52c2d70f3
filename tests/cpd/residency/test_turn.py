"""Workers that look at one record in any order."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpd.residency.predicted import Predicted
from cpd.residency.record import SETTLE_S, Record
from cpd.residency.rule import Rule
from cpd.residency.snapshot import ModelState, ResidencyPolicy
from cpd.residency.turn import refusal
from tests.cpd.residency.world import Worker, World, entry, worker

TOTAL = 10


def states(world: World) -> dict[str, ModelState]:
    assert world.record is not None
    return {one.id: one.state for one in world.record.entries}


def really(one: Worker) -> ModelState:
    return one.own.state


def reserved(world: World) -> int:
    assert world.record is not None
    return world.record.reserved_bytes


def awake(world: World, one: Worker) -> None:
    """Wakes a worker for a request."""
    world.request(one)
    world.step(one)
    assert really(one) is ModelState.WAKING
    world.load_ends(one)
    world.step(one)
    assert states(world)[one.name] is ModelState.SERVING


def test_a_worker_with_requests_wakes_and_serves() -> None:
    a = worker(1, 4)
    world = World(TOTAL, [a])
    world.step(a)
    assert states(world) == {"w1": ModelState.ASLEEP}
    world.request(a)
    world.step(a)
    assert states(world) == {"w1": ModelState.WAKING}
    assert a.intent
    world.load_ends(a)
    world.step(a)
    assert states(world) == {"w1": ModelState.SERVING}
    assert (a.intent, a.running) == (False, 1)


def test_of_two_wakers_one_wins_and_the_other_waits() -> None:
    a, b = worker(1, 4), worker(2, 4)
    world = World(TOTAL, [a, b])
    for one in (a, b):
        world.request(one)
    world.look(a)
    world.look(b)
    assert world.write(a)
    assert not world.write(b)
    world.step(b)
    assert states(world) == {"w1": ModelState.WAKING, "w2": ModelState.ASLEEP}
    assert b.intent
    world.load_ends(a)
    world.step(a)
    world.step(b)
    assert states(world) == {"w1": ModelState.SERVING, "w2": ModelState.WAKING}


def test_a_victim_drains_sleeps_and_comes_back_for_its_parked_requests() -> None:
    a, b = worker(1, 8), worker(2, 8)
    world = World(TOTAL, [a, b])
    awake(world, a)
    world.request(b)
    world.now += 11
    world.step(b)
    assert (
        states(world)["w1"] is ModelState.SERVING
    )  # for its max_wait_time it waits for memory that becomes free by itself
    world.now += 5.5
    world.step(a)
    world.step(b)
    assert states(world)["w1"] is ModelState.DRAINING
    world.step(a)
    assert really(a) is ModelState.DRAINING
    world.now += 30
    world.step(b)
    world.step(a)
    assert really(a) is ModelState.SLEEPING
    assert a.waiting == 1
    world.step(b)
    assert really(b) is ModelState.ASLEEP
    world.sleep_ends(a)
    world.step(a)
    assert a.intent
    world.step(b)
    assert really(b) is ModelState.WAKING


def test_a_victim_that_nobody_needs_any_more_serves_on() -> None:
    a, b = worker(1, 8), worker(2, 8)
    world = World(TOTAL, [a, b])
    awake(world, a)
    world.request(b)
    world.now += 16
    world.step(b)
    world.now += 6
    world.step(a)
    world.step(b)
    world.step(a)
    assert really(a) is ModelState.DRAINING
    b.waiting = 0  # its client hung up
    world.step(b)
    assert not b.intent
    world.step(a)
    assert states(world)["w1"] is ModelState.SERVING
    assert really(a) is ModelState.SERVING


def test_a_wake_that_fails_gives_the_memory_and_the_lock_back() -> None:
    a, b = worker(1, 8), worker(2, 8)
    world = World(TOTAL, [a, b])
    for one in (a, b):
        world.request(one)
        world.step(one)
    world.load_ends(a, failed=True)
    world.step(a)
    assert (states(world)["w1"], a.intent) == (ModelState.ASLEEP, False)
    world.step(b)
    assert really(b) is ModelState.WAKING


def test_a_model_that_takes_more_than_was_reserved_sleeps_until_that_much_is_free() -> None:
    a, b = worker(1, 4), worker(2, 5, really=7)
    world = World(TOTAL, [a, b])
    awake(world, a)
    world.request(b)
    world.step(b)
    world.load_ends(b)
    world.step(b)
    assert states(world)["w2"] is ModelState.SLEEPING
    assert reserved(world) <= TOTAL
    world.sleep_ends(b)
    world.step(b)
    assert world.record is not None
    assert (world.record.get("w2").memory_bytes, world.record.measured) == (7, {"f1": 4, "f2": 7})
    assert b.intent
    assert really(b) is ModelState.ASLEEP


def test_what_was_measured_is_reserved_the_next_time() -> None:
    a = worker(1, 4, really=6)
    world = World(TOTAL, [a])
    awake(world, a)
    assert reserved(world) == 6
    a.alive = False
    successor = worker(1, 4, really=6)
    successor.own = replace(successor.own, entry=replace(entry(1, 4), owner=entry(7, 4).owner))
    world.workers = {"old": a, "w1": successor}
    world.step(successor)
    world.request(successor)
    world.step(successor)
    assert really(successor) is ModelState.WAKING
    assert reserved(world) == 6


def test_what_a_sleeper_still_holds_is_not_given_away() -> None:
    a, b = worker(1, 6), worker(2, 6)
    world = World(TOTAL, [a, b])
    awake(world, a)
    world.now += 20
    a.running = 0
    a.own = replace(a.own, sleep=True)
    world.step(a)
    assert really(a) is ModelState.SLEEPING
    a.own = replace(a.own, entry=replace(a.own.entry, held_bytes=5))
    world.sleep_ends(a)
    world.step(a)
    assert reserved(world) == 5
    world.request(b)
    world.step(b)
    assert really(b) is ModelState.ASLEEP
    assert b.failures == [
        "w2 can never be awake: it takes 0.00 GiB, and the device has 0.00 GiB for models (--device-memory)"
    ]


def test_a_pinned_worker_is_no_victim() -> None:
    a, b = worker(1, 8), worker(2, 8)
    world = World(TOTAL, [a, b])
    awake(world, a)
    a.own = replace(a.own, pin=True)
    world.step(a)
    world.now += 20
    world.request(b)
    world.step(b)
    world.now += 6
    world.step(a)
    world.step(b)
    assert states(world)["w1"] is ModelState.SERVING
    assert "popular or pinned models, which nobody may displace" in b.failures[0]
    a.own = replace(a.own, pin=False)
    world.step(a)
    world.request(b)
    world.step(b)
    world.now += 6
    world.step(a)
    world.step(b)
    assert states(world)["w1"] is ModelState.DRAINING


def test_the_entry_of_a_process_that_is_gone_is_removed_by_whoever_sees_it() -> None:
    a, b = worker(1, 8), worker(2, 8)
    world = World(TOTAL, [a, b])
    for one in (a, b):
        world.request(one)
        world.step(one)
    a.alive = False
    world.step(b)
    assert states(world) == {"w2": ModelState.WAKING}


def test_a_silent_waker_keeps_the_lock() -> None:
    a, b = worker(1, 4), worker(2, 4)
    world = World(TOTAL, [a, b])
    for one in (a, b):
        world.request(one)
        world.step(one)
    for _ in range(100):
        world.now += 10
        world.step(b)
    assert states(world) == {"w1": ModelState.WAKING, "w2": ModelState.ASLEEP}


def test_a_silent_worker_that_waits_keeps_nobody_else_waiting() -> None:
    a, b, c = worker(1, 8), worker(2, 8), worker(3, 8)
    world = World(TOTAL, [a, b, c])
    awake(world, a)
    for one in (b, c):
        world.request(one)
        world.step(one)
    world.now += 20
    a.running = 0
    world.step(a)
    world.step(c)
    assert states(world)["w1"] is ModelState.DRAINING  # for c, since b is silent
    world.step(a)
    world.sleep_ends(a)
    world.step(a)
    world.step(c)
    assert really(c) is ModelState.WAKING
    world.step(b)
    assert b.intent


def test_a_silent_worker_is_no_victim_while_there_are_others() -> None:
    a, b, c = worker(1, 5), worker(2, 5), worker(3, 5)
    world = World(TOTAL, [a, b, c])
    awake(world, a)
    awake(world, b)
    a.running = b.running = 0
    world.now += 20
    world.step(b)
    world.request(c)
    world.step(c)
    assert states(world) == {"w1": ModelState.SERVING, "w2": ModelState.DRAINING, "w3": ModelState.ASLEEP}


def test_a_lost_record_is_written_anew_before_anybody_wakes() -> None:
    a, b, c = worker(1, 4), worker(2, 4), worker(3, 8)
    world = World(TOTAL, [a, b, c])
    awake(world, a)
    world.request(b)
    world.step(b)
    world.request(c)
    world.step(c)
    before = world.record
    promised = c.own.intent_s
    a.own = replace(a.own, pin=True)
    world.lose()
    world.step(c)
    assert really(c) is ModelState.ASLEEP
    world.step(b)
    world.step(a)
    assert before is not None
    assert world.record is not None
    assert states(world) == {"w1": ModelState.SERVING, "w2": ModelState.WAKING, "w3": ModelState.ASLEEP}
    assert (world.record.reserved_bytes, world.record.pins) == (before.reserved_bytes, ("w1",))
    assert c.own.intent_s == promised
    assert world.record.measured == {"f1": 4}
    a.alive = b.alive = False
    world.step(c)
    assert really(c) is ModelState.ASLEEP
    world.now += SETTLE_S + 0.1
    world.step(c)
    assert really(c) is ModelState.WAKING


def test_intents_come_back_into_a_lost_record_in_their_order() -> None:
    a, b, c = worker(1, 8), worker(2, 8), worker(3, 8)
    world = World(TOTAL, [a, b, c])
    awake(world, a)
    for one in (b, c):
        world.now += 1
        world.request(one)
        world.step(one)
    world.lose()
    for one in (c, a, b):
        world.step(one)
    assert world.record is not None
    assert [one.worker for one in world.record.intents] == ["w2", "w3"]


def test_a_start_without_requests_can_be_displaced_at_once() -> None:
    a, b = worker(1, 8), worker(2, 8)
    world = World(TOTAL, [a, b])
    a.own = replace(a.own, starts=True)
    a.waiting = 1
    world.step(a)
    a.waiting = 0
    world.load_ends(a)
    world.step(a)
    world.request(b)
    world.step(b)
    assert states(world)["w1"] is ModelState.DRAINING


def test_a_successor_waits_for_the_memory_of_a_predecessor_that_is_not_proved_gone() -> None:
    a = worker(1, 8)
    world = World(TOTAL, [a])
    awake(world, a)
    successor = worker(1, 8)
    successor.own = replace(successor.own, entry=replace(entry(1, 8), owner=entry(7, 4).owner))
    world.workers = {"old": a, "w1": successor}
    world.request(successor)
    world.step(successor)
    assert really(successor) is ModelState.ASLEEP
    assert reserved(world) == 8
    assert world.record is not None
    assert [one.id for one in world.record.entries] == ["w1 (process 101, started at 1001)", "w1"]
    world.step(a)  # it goes on under that name
    assert len(world.record.entries) == 2
    a.alive = False
    world.step(successor)
    assert really(successor) is ModelState.WAKING


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "model-1", "role": "prefill"}, "w2 is a prefill worker of this model on this machine"),
        ({"model": "model-1", "role": "combined"}, ""),
        ({"model": "model-2", "role": "prefill"}, ""),
    ],
)
def test_both_roles_of_one_model_on_a_device_are_refused(other: dict[str, str], reason: str) -> None:
    record = Record(TOTAL, entries=(entry(2, 4, **other),))
    assert refusal(record, worker(1, 4).own).startswith(reason)
    assert bool(refusal(record, worker(1, 4).own)) == bool(reason)


def test_workers_with_different_budgets_for_one_device_are_refused() -> None:
    own = worker(1, 4, total=11).own
    assert "--device-memory is 11 bytes here, and 10 for the other workers" in refusal(
        Record(TOTAL, entries=(entry(2, 4),)), own
    )
    assert refusal(Record(TOTAL), own) == ""


@pytest.mark.parametrize("policy", [Rule(), Predicted()])
def test_many_workers_in_two_places_are_all_served_as_promised(policy: ResidencyPolicy) -> None:
    """Each looks every second, loads for one second, and has a request of four seconds every now and then."""
    workers = [worker(number, 5) for number in range(6)]
    world = World(TOTAL, workers, policy)
    ends: dict[str, float] = {}
    done: dict[str, float] = {}
    waits: list[tuple[float, float]] = []
    for tick in range(2_000):
        world.now += 0.1
        if tick < 1_400 and tick % 37 == 0:
            world.request(workers[(tick // 37 * 5) % 6])
        for one in workers:
            if one.own.state in (ModelState.WAKING, ModelState.SLEEPING) and world.now >= done.setdefault(
                one.name, world.now + (1.0 if one.own.state is ModelState.WAKING else 0.1)
            ):
                del done[one.name]
                (world.load_ends if one.own.state is ModelState.WAKING else world.sleep_ends)(one)
            if one.running and world.now >= ends.setdefault(one.name, world.now + 4):
                del ends[one.name]
                one.running = 0
            promised = one.own.intent_s
            world.step(one)
            if promised is not None and one.own.intent_s is None:
                waits.append((world.now - promised[0], promised[1] - promised[0]))
        assert reserved(world) <= TOTAL
        assert sum(one.held for one in workers) <= TOTAL
    assert not any(one.waiting or one.failures for one in workers)
    assert len(waits) > 10
    # A look may come a tenth of a second late at each of a few steps.
    assert all(took_s <= promised_s + 1 for took_s, promised_s in waits)


class Interleavings(RuleBasedStateMachine):
    """Workers that look, write, load, fail, sleep and die in any order."""

    @initialize(
        sizes=st.lists(st.tuples(st.integers(1, TOTAL), st.integers(1, TOTAL)), min_size=2, max_size=4),
        predicted=st.booleans(),
    )
    def begin(self, sizes: list[tuple[int, int]], predicted: bool) -> None:
        workers = [worker(number, size, really=really) for number, (size, really) in enumerate(sizes)]
        self.world = World(TOTAL, workers, Predicted() if predicted else Rule())
        self.over = False  # a model may take more than was reserved, until it has gone to sleep again

    def pick(self, index: int) -> Worker | None:
        alive = [one for one in self.world.workers.values() if one.alive]
        return alive[index % len(alive)] if alive else None

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(index=st.integers(0, 9))
    def looks(self, index: int) -> None:
        if one := self.pick(index):
            self.world.look(one)

    @rule(index=st.integers(0, 9))
    def writes(self, index: int) -> None:
        one = self.pick(index)
        if one is not None and one.read is not None:
            self.world.write(one)

    @rule(index=st.integers(0, 9))
    def looks_and_writes(self, index: int) -> None:
        if one := self.pick(index):
            self.world.step(one)

    @rule(index=st.integers(0, 9))
    def request_arrives(self, index: int) -> None:
        if one := self.pick(index):
            self.world.request(one)

    @rule(index=st.integers(0, 9))
    def requests_end(self, index: int) -> None:
        if one := self.pick(index):
            one.running = 0

    @rule(index=st.integers(0, 9), failed=st.booleans())
    def load_ends(self, index: int, failed: bool) -> None:
        one = self.pick(index)
        if one is not None and one.own.state is ModelState.WAKING:
            self.world.load_ends(one, failed=failed)

    @rule(index=st.integers(0, 9))
    def sleep_ends(self, index: int) -> None:
        one = self.pick(index)
        if one is not None and one.own.state is ModelState.SLEEPING:
            self.world.sleep_ends(one)

    @rule(index=st.integers(0, 9), hand=st.sampled_from(["sleep", "pin", "unpin"]))
    def by_hand(self, index: int, hand: str) -> None:
        if one := self.pick(index):
            one.own = replace(one.own, sleep=True) if hand == "sleep" else replace(one.own, pin=hand == "pin")

    @rule(index=st.integers(0, 9))
    def dies(self, index: int) -> None:
        if one := self.pick(index):
            one.alive = False

    @precondition(lambda self: self.world.record is not None)
    @rule(order=st.permutations(range(4)))
    def redis_is_emptied(self, order: list[int]) -> None:
        """All that live look within the time that a lost record leaves them."""
        self.world.lose()
        workers = list(self.world.workers.values())
        for index in order:
            if index < len(workers) and workers[index].alive:
                self.world.step(workers[index])

    @invariant()
    def never_more_is_reserved_than_there_is(self) -> None:
        if (record := self.world.record) is None:
            return
        assert record.reserved_bytes <= TOTAL or record.settles_at_s
        assert sum(one.state is ModelState.WAKING for one in record.entries) <= 1

    @invariant()
    def memory_that_is_taken_is_reserved(self) -> None:
        record = self.world.record
        if record is None:
            return
        for one in self.world.workers.values():
            if one.alive and one.own.state is not ModelState.ASLEEP:
                mine = record.of(one.own.entry.owner)
                assert mine is not None
                assert mine.state is not ModelState.ASLEEP

    @invariant()
    def no_intent_is_lost(self) -> None:
        if (record := self.world.record) is None:
            return
        for one in self.world.workers.values():
            if one.alive and one.intent:
                mine = record.of(one.own.entry.owner)
                assert mine is not None
                assert record.intent_of(mine.id) is not None


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestInterleavings = Interleavings.TestCase
