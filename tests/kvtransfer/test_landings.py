from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import TransferError
from kvtransfer.base import PoolMemory
from kvtransfer.landings import LandingEntry, LandingState, LandingTable

PAGES = 12
SENDERS = ["one", "other"]

operations = st.lists(
    st.tuples(
        st.sampled_from(["expect", "begin", "begin", "begin", "finish", "finish", "revoke", "lost"]),
        st.integers(0, 3),  # reservation
        st.integers(0, PAGES - 1),
        st.integers(1, 4),
        st.sampled_from(SENDERS),
    ),
    max_size=60,
)


class Loop:
    """Stands in for the event loop: these tests await nothing."""

    def call_soon_threadsafe(self, *_: Any) -> None:
        pass


@given(operations)
def test_pages_are_safe_exactly_when_nothing_writes_them_and_nothing_can_begin(ops: list[Any]) -> None:
    table = LandingTable(Loop(), PoolMemory(0, PAGES, 64), epoch=1)  # type: ignore[arg-type]
    landings: dict[int, LandingEntry] = {}
    writing: list[tuple[LandingEntry, str, set[int]]] = []  # what the transport has in progress

    for what, reservation, first, count, sender in ops:
        landing = landings.get(reservation)
        if what == "expect":
            pages = [(first + k) % PAGES for k in range(count)]
            open_pages = {p for other in landings.values() if not other.settled for p in other.pages}
            if (landing is None or landing.settled) and not open_pages & set(pages):
                landings[reservation] = table.expect(reservation, 1, pages, ())
            else:
                with pytest.raises(ValueError, match="open"):
                    table.expect(reservation, 1, pages, ())
        elif what == "begin" and landing:
            index = first % len(landing.pages)
            busy = {k for other, _, indices in writing if other is landing for k in indices}
            try:
                table.begin(sender, 1, reservation, 1, [(index, 1)])
            except TransferError:
                continue
            assert index not in busy
            assert landing.state is LandingState.OPEN
            writing.append((landing, sender, {index}))
        elif what == "finish" and writing:
            done, _, indices = writing.pop(first % len(writing))
            table.finish(done, len(indices))
        elif what == "revoke" and landing:
            assert landing.revoke() == (not any(other is landing for other, _, _ in writing))
        elif what == "lost":
            table.fail(sender, "gone", gone=True)
            writing = [entry for entry in writing if entry[1] != sender]
        for each in landings.values():
            in_progress = any(other is each for other, _, _ in writing)
            assert each.settled == (each.state is not LandingState.OPEN and not in_progress)

    for sender in SENDERS:
        table.fail(sender, "gone", gone=True)
    for each in landings.values():
        assert each.revoke()
    table.expect(99, 1, range(PAGES), ())
