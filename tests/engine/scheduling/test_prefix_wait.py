from engine.scheduling.prefix_wait import PendingBlocks

A, B, C, D = b"a", b"b", b"c", b"d"


def test_the_first_filler_keeps_its_claim() -> None:
    pending = PendingBlocks[str]()
    pending.claim("first", [A, B])
    pending.claim("second", [B, C])
    assert pending.producers() == {A: "first", B: "first", C: "second"}
    pending.check_integrity()


def test_last_shared_is_the_last_block_of_one_filler_without_a_gap() -> None:
    pending = PendingBlocks[str]()
    pending.claim("first", [A, B])
    pending.claim("second", [C])
    assert pending.last_shared([A, B, C, D], 0) == B
    assert pending.last_shared([A, B, C, D], 2) == C
    assert pending.last_shared([A, B, C, D], 3) is None
    assert pending.last_shared([A, B], 2) is None


def test_publishing_a_block_wakes_its_waiters() -> None:
    pending = PendingBlocks[str]()
    pending.claim("producer", [A, B])
    for waiter, block_hash in (("x", A), ("y", B), ("z", B)):
        pending.wait(waiter, block_hash)
    assert pending.published([A]) == ["x"]
    assert pending.waiting() == ["y", "z"]
    assert pending.published([B]) == ["y", "z"]
    assert pending.published([C]) == []
    pending.check_integrity()


def test_giving_up_wakes_all_waiters_of_the_filler() -> None:
    pending = PendingBlocks[str]()
    pending.claim("producer", [A, B])
    pending.claim("other", [C])
    for waiter, block_hash in (("x", A), ("y", B), ("z", C)):
        pending.wait(waiter, block_hash)
    assert pending.give_up("producer") == ["x", "y"]
    assert pending.give_up("producer") == []
    assert pending.producers() == {C: "other"}
    pending.check_integrity()


def test_giving_up_leaves_blocks_that_another_filler_has_claimed_since() -> None:
    pending = PendingBlocks[str]()
    pending.claim("first", [A])
    pending.published([A])
    pending.claim("second", [A])  # it was evicted meanwhile
    assert pending.give_up("first") == []
    assert pending.producers() == {A: "second"}


def test_a_waiter_that_stops_waiting_is_not_woken() -> None:
    pending = PendingBlocks[str]()
    pending.claim("producer", [A])
    pending.wait("x", A)
    pending.wait("y", A)
    pending.stop_waiting("x")
    pending.check_integrity()
    assert pending.published([A]) == ["y"]
