import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.process_identity import ProcessIdentity
from cpd.residency.record import (
    MOST_S,
    SILENT_S,
    Activity,
    Entry,
    Owner,
    Record,
    SeenActivity,
    UnreadableRecordError,
    Waiting,
    drops_staged,
    dump,
    joined,
    parse_activity,
    parse_record,
    pinned,
    snapshot,
    wanted,
    woken,
)
from cpd.residency.snapshot import ModelState
from tests.cpd.residency.world import entry, owner

NOW = 1_000.0

seconds = st.floats(0, MOST_S)
sizes = st.integers(0, 1 << 60)
numbers = st.integers(0, 1 << 32)
owners = st.builds(Owner, st.text(max_size=32), numbers, st.integers(1, (1 << 31) - 1), numbers)
entries = st.builds(
    Entry,
    id=st.text(max_size=9),
    model=st.text(max_size=9),
    role=st.sampled_from(["prefill", "combined"]),
    owner=owners,
    memory_bytes=sizes,
    held_bytes=sizes,
    state=st.sampled_from(ModelState),
    since_s=seconds,
    needed_by=st.text(max_size=9),
    wake_s=seconds,
    popular=st.booleans(),
    min_runtime_s=seconds,
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    some = draw(st.lists(entries, max_size=4, unique_by=(lambda one: one.id, lambda one: one.owner)))
    waiting = [Waiting(one.id, draw(seconds), draw(seconds)) for one in some if draw(st.booleans())]
    measured = draw(st.dictionaries(st.text(max_size=9), sizes, max_size=3))
    return Record(draw(sizes), draw(seconds), tuple(some), tuple(waiting), measured, tuple(draw(st.lists(st.text()))))


def activities(*told: tuple[int, Activity], seen_s: float = NOW) -> dict[str, SeenActivity]:
    return {owner(number).key: SeenActivity(seen_s, activity) for number, activity in told}


@given(records())
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert parse_record(dump(record)) == record


@given(
    st.builds(
        Activity,
        waiting=st.integers(0, 1 << 32),
        deadlines=st.lists(seconds, max_size=5).map(tuple),
        drain_s=seconds,
        staged_bytes=sizes,
    )
)
def test_an_activity_is_read_as_it_was_written(activity: Activity) -> None:
    assert parse_activity(dump(activity)) == activity


def test_unknown_fields_are_ignored() -> None:
    record = Record(9, entries=(entry(1, 4),), intents=(Waiting("w1", 1.0, 2.0),))
    newer = json.loads(dump(record)) | {"colour": "red"}
    newer["entries"][0]["taste"] = newer["entries"][0]["owner"]["smell"] = "sweet"
    assert parse_record(json.dumps(newer).encode()) == record


def edited(**changes: Any) -> bytes:
    return json.dumps(json.loads(dump(Record(9, entries=(entry(1, 4),)))) | changes).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Invalid JSON"),
        (b"[]", "Input should be an object"),
        (edited(total_bytes=-1), "total_bytes: .* greater than or equal to 0"),
        (edited(total_bytes="9"), "total_bytes: .* valid integer"),
        (edited(settles_at_s=None), "settles_at_s"),
        (edited(entries=[{"id": "w1"}]), r"entries: 0: model: Field required"),
        (dump(Record(9, entries=(entry(1, 4), replace(entry(2, 4), id="w1")))), "two entries of one name"),
        (dump(Record(9, entries=(entry(1, 4), replace(entry(1, 4), id="w2")))), "two entries of one process"),
        (dump(Record(9, intents=(Waiting("w1", 1, 2),))), "an intent of a worker that is not in it"),
    ],
)
def test_a_damaged_record_is_unreadable(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableRecordError, match=reason):
        parse_record(data)


def test_a_policy_sees_workers_as_models_of_their_own() -> None:
    record = Record(
        100,
        entries=(
            entry(1, 40, state=ModelState.SERVING, since_s=900.0, popular=True),
            replace(entry(2, 30), held_bytes=10, staged_wake_s=0.5),
            entry(3, 20, state=ModelState.WAKING),
        ),
        intents=(Waiting("w3", 1, 2), Waiting("w2", 3, 4)),
        pins=("w2",),
    )
    told = activities((1, Activity(running=2, last_access_s=950.0)), (2, Activity(1, deadlines=(5.0,), staged_bytes=1)))
    device = snapshot(record, told, NOW)
    assert device.memory_bytes == 90  # without what a sleeper holds
    assert [(one.name, one.memory_bytes, one.fairness.popular) for one in device.models] == [
        ("w1", 40, True),
        ("w2", 20, True),
        ("w3", 20, False),
    ]
    serving, waking = device.occupants
    assert (serving.state, serving.since_s, serving.running, serving.last_access_s) == (ModelState.SERVING, 900, 2, 950)
    assert (serving.responds, waking.responds) == (True, False)
    (intent,) = device.intents  # that of a waking worker is about to end
    assert (intent.model.name, intent.since_s, intent.latest_s, intent.deadlines, intent.wake_s) == (
        "w2",
        3,
        4,
        (5.0,),
        0.5,
    )


def test_intents_of_silent_workers_are_left_out() -> None:
    record = Record(100, entries=(entry(1, 40),), intents=(Waiting("w1", 1, 2),))
    for seen_s, visible in ((NOW - SILENT_S + 0.1, 1), (NOW - SILENT_S, 0)):
        assert len(snapshot(record, activities((1, Activity(1)), seen_s=seen_s), NOW).intents) == visible
    assert not snapshot(record, {}, NOW).intents


def test_the_wake_lock_is_given_once_and_only_with_memory() -> None:
    record = Record(10, entries=(entry(1, 6), entry(2, 4), entry(3, 6)))
    one = woken(record, "w1", NOW)
    assert one.get("w1").state is ModelState.WAKING
    assert woken(one, "w2", NOW) == one
    served = replace(one, entries=(replace(one.entries[0], state=ModelState.SERVING), *one.entries[1:]))
    assert woken(served, "w3", NOW) == served
    assert woken(served, "w2", NOW).reserved_bytes == 10
    settling = replace(record, settles_at_s=NOW + 1)
    assert woken(settling, "w1", NOW) == settling
    assert woken(record, "nobody", NOW) == record


def test_an_intent_is_promised_a_time_and_written_once() -> None:
    record = Record(10, entries=(entry(1, 6), entry(2, 6, state=ModelState.SERVING, since_s=NOW)))
    told = activities((1, Activity(1)), (2, Activity(running=1)))
    once = wanted(record, "w1", told, NOW)
    (intent,) = once.intents
    assert intent.since_s == NOW
    assert intent.latest_s == pytest.approx(NOW + 10 + 30 + 0.1 + 2)  # min_runtime, drain, sleep, twice the wake
    assert wanted(once, "w1", told, NOW + 1) == once


def test_a_new_process_of_the_same_name_does_not_take_its_predecessors_entry() -> None:
    before = Record(10, entries=(entry(1, 6, state=ModelState.SERVING),), intents=(Waiting("w1", 1, 2),))
    after = joined(before, replace(entry(1, 6), owner=owner(2)))
    assert [one.state for one in after.entries] == [ModelState.SERVING, ModelState.ASLEEP]
    assert after.intents[0].worker == after.entries[0].id != "w1"
    assert after.of(owner(2)) == after.get("w1")
    assert parse_record(dump(after)) == after


def test_pins_are_kept_once_each() -> None:
    record = pinned(pinned(Record(9), "a", True), "a", True)
    assert record.pins == ("a",)
    assert pinned(record, "a", False).pins == pinned(record, "b", False).pins[1:] == ()


def test_the_least_recently_used_staged_weights_go_first() -> None:
    record = Record(100, entries=(entry(1, 9), entry(2, 9), entry(3, 9, state=ModelState.WAKING), entry(4, 9)))
    told = activities(
        (1, Activity(staged_bytes=4, last_access_s=30.0)),
        (2, Activity(staged_bytes=4, last_access_s=20.0)),
        (3, Activity(staged_bytes=4, last_access_s=10.0)),
    )
    silent = told | activities((4, Activity(staged_bytes=4, last_access_s=1.0)), seen_s=NOW - SILENT_S)

    def dropped(budget: int, heard: dict[str, SeenActivity]) -> list[str]:
        return [one.id for one in record.entries if drops_staged(record, heard, one.id, budget, NOW)]

    assert dropped(12, told) == []
    assert dropped(11, told) == ["w2"]
    assert dropped(8, told) == ["w2"]
    assert dropped(7, told) == ["w1", "w2"]
    assert dropped(12, silent) == ["w2"]


def test_a_process_is_gone_only_if_the_observer_can_see_that() -> None:
    own = ProcessIdentity.own()
    ended = replace(own, started=own.started - 1)
    assert not Owner.of(own).is_gone(own)
    assert Owner.of(ended).is_gone(own)
    assert not Owner.of(replace(ended, boot=bytes(16))).is_gone(own)
    assert not Owner.of(replace(ended, pid_namespace=own.pid_namespace + 1)).is_gone(own)
    assert not replace(Owner.of(ended), boot="nonsense").is_gone(own)
    assert not replace(Owner.of(ended), pid=1 << 40).is_gone(own)
