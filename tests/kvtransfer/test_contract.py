"""The contract of kvtransfer/base.py, tested on all transports."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpd.common.errors import StaleTransferError, TransferError
from kvtransfer.base import Landing, Peer, Segment, Ticket, Transfer, Transport
from kvtransfer.session.frames import Grant, Offer, Refuse
from kvtransfer.session.limits import WINDOW
from kvtransfer.session.receiving import Receiving
from tests.kvtransfer.pools import EMPTY, Local, Network, Pool, Real, Simulated, Streamed, ticket
from tests.waiting import DEADLINE_S, eventually

T = TypeVar("T")


NETWORKS: dict[str, Callable[[], Network]] = {
    "local": Local,
    "simulated": Simulated,
    "ucx": lambda: Real("ucx"),
    "nixl": lambda: Real("nixl"),
    "stream": Streamed,
}


@pytest.fixture(
    params=[
        pytest.param(make, id=name, marks=pytest.mark.nixl if name == "nixl" else ()) for name, make in NETWORKS.items()
    ]
)
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    network: Network = request.param()
    yield network
    await network.close()


@dataclass(frozen=True)
class Pair:
    """A receiver with an empty pool, a sender with a full one, and the sender's connection to the receiver."""

    target: Pool
    source: Pool
    receiver: Transport
    sender: Transport
    peer: Peer

    def arrived(self, own: Sequence[int], pages: Sequence[int]) -> bool:
        return bool((self.target.pages[list(pages)] == self.source.pages[list(own)]).all())

    async def begun(self) -> None:
        """Returns when the first page has begun to change: the rest of the push is still in flight."""
        async with asyncio.timeout(DEADLINE_S):
            while self.target.untouched([0]):  # noqa: ASYNC110 - a pause would let a fast push end meanwhile
                await asyncio.sleep(0)

    def untouched_but(self, pages: Sequence[int]) -> bool:
        return self.target.untouched(sorted(set(range(len(self.target.pages))) - set(pages)))

    async def send(self, reservation: int, own: Sequence[int], pages: Sequence[int]) -> None:
        """Fills a landing in one push, and checks it."""
        landing = self.receiver.expect(reservation, 1, pages)
        transfer = self.peer.push(ticket(self.receiver, reservation, 1, pages), pairs(own))
        await within(landing.done())
        assert self.arrived(own, pages)
        await within(transfer.done())


async def connected(network: Network, num_pages: int = 64, page_bytes: int = 4096) -> Pair:
    target, source = Pool(num_pages, page_bytes), Pool(num_pages, page_bytes, seed=7)
    receiver, sender = await network.open(target, epoch=11), await network.open(source, epoch=22)
    return Pair(target, source, receiver, sender, await sender.connect(receiver.address))


@pytest.fixture
async def pair(network: Network) -> Pair:
    return await connected(network)


async def within(awaitable: Awaitable[T]) -> T:
    """Awaits with a time limit."""
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable


def pairs(own: Sequence[int], first: int = 0) -> list[tuple[int, int]]:
    """Pairs of own pages and the indices from `first` on."""
    return [(page, first + k) for k, page in enumerate(own)]


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, a receiver admits only the first batches of a push: a slow test still finds it in flight.

    A receiver on the test's own event loop is not held up: it makes no progress while the test acts.
    """
    admit, own, event = Receiving.admit, threading.get_ident(), threading.Event()

    def admitted(receiving: Receiving, offer: Offer) -> Grant | Refuse:
        if offer.batch >= WINDOW and threading.get_ident() != own:
            event.wait(DEADLINE_S)
        return admit(receiving, offer)

    monkeypatch.setattr(Receiving, "admit", admitted)
    yield event
    event.set()


# ---- pages land


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_scattered_pages_land_bit_for_bit_and_nothing_else_is_written(pair: Pair, data: st.DataObject) -> None:
    pair.target.pages[:] = EMPTY
    count = data.draw(st.integers(1, 64))
    rng = data.draw(st.randoms(use_true_random=False))
    own, pages = rng.sample(range(64), count), rng.sample(range(64), count)
    await pair.send(1, own, pages)
    assert pair.untouched_but(pages)


@pytest.mark.parametrize("page_bytes", [1, 1000, 16384, 100_003, 2_359_296])
async def test_every_page_size_lands(network: Network, page_bytes: int) -> None:
    pair = await connected(network, num_pages=12, page_bytes=page_bytes)
    await pair.send(1, [0, 1, 2, 3, 9, 7], [5, 6, 7, 8, 0, 11])
    assert pair.untouched_but([5, 6, 7, 8, 0, 11])


async def test_contiguous_pages_land(network: Network) -> None:
    pair = await connected(network, num_pages=3000, page_bytes=512)
    await pair.send(1, range(100, 2900), range(50, 2850))
    assert pair.untouched_but(range(50, 2850))


async def test_many_scattered_pages_land(network: Network) -> None:
    pair = await connected(network, num_pages=1500, page_bytes=64)
    rng = random.Random(3)
    await pair.send(1, rng.sample(range(1500), 1500), rng.sample(range(1500), 1500))


async def test_more_bytes_than_are_ever_in_flight_land(network: Network) -> None:
    pair = await connected(network, num_pages=48, page_bytes=1 << 20)
    await pair.send(1, range(48), list(reversed(range(48))))


async def test_own_pages_may_go_to_several_indices(pair: Pair) -> None:
    await pair.send(1, [4, 4, 4], [1, 9, 3])


async def test_a_landing_takes_several_pushes_in_any_order(pair: Pair) -> None:
    pages, own = random.Random(1).sample(range(64), 30), random.Random(2).sample(range(64), 30)
    landing = pair.receiver.expect(1, 1, pages)
    current = ticket(pair.receiver, 1, 1, pages)
    transfers = [
        pair.peer.push(current, pairs(own[a:b], first=a)) for a, b in [(20, 30), (0, 1), (1, 12), (12, 12), (12, 20)]
    ]
    await within(landing.done())
    assert pair.arrived(own, pages)
    for transfer in transfers:
        await within(transfer.done())


async def test_a_landing_is_not_done_before_its_last_page(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [3, 4, 5])
    await within(pair.peer.push(ticket(pair.receiver, 1, 1, [3, 4, 5]), [(0, 0), (1, 2)]).done())
    done = asyncio.create_task(landing.done())
    await within(pair.peer.push(ticket(pair.receiver, 1, 1, [3, 4, 5]), []).done())
    assert not done.done()
    pair.peer.push(ticket(pair.receiver, 1, 1, [3, 4, 5]), [(2, 1)])
    await within(done)
    assert pair.arrived([0, 2, 1], [3, 4, 5])


async def test_several_landings_at_once_do_not_mix(pair: Pair) -> None:
    pages = random.Random(4).sample(range(64), 64)
    own = random.Random(5).sample(range(64), 64)
    landings = [pair.receiver.expect(k, k + 1, pages[8 * k : 8 * k + 8]) for k in range(8)]
    for k in reversed(range(8)):
        current = ticket(pair.receiver, k, k + 1, pages[8 * k : 8 * k + 8])
        pair.peer.push(current, pairs(own[8 * k : 8 * k + 8]))
    await within(asyncio.gather(*(landing.done() for landing in landings)))
    assert pair.arrived(own, pages)


async def test_several_senders_fill_one_receiver(network: Network) -> None:
    target = Pool(60)
    receiver = await network.open(target)
    sources = [Pool(20, seed=k) for k in range(3)]
    landings = []
    for k, source in enumerate(sources):
        peer = await (await network.open(source)).connect(receiver.address)
        pages = list(range(k, 60, 3))
        landings.append(receiver.expect(k, 1, pages))
        peer.push(ticket(receiver, k, 1, pages), pairs(range(20)))
    await within(asyncio.gather(*(landing.done() for landing in landings)))
    for k, source in enumerate(sources):
        assert (target.pages[k::3] == source.pages).all()


async def test_one_sender_fills_several_receivers(network: Network) -> None:
    source = Pool(20, seed=1)
    sender = await network.open(source)
    targets = [Pool(20) for _ in range(3)]
    for target in targets:
        receiver = await network.open(target)
        landing = receiver.expect(1, 1, range(20))
        (await sender.connect(receiver.address)).push(ticket(receiver, 1, 1, range(20)), pairs(range(20)))
        await within(landing.done())
        assert (target.pages == source.pages).all()


async def test_two_transports_push_to_each_other(network: Network) -> None:
    pair = await connected(network)
    back = await pair.receiver.connect(pair.sender.address)
    there, here = pair.receiver.expect(1, 1, [0, 1]), pair.sender.expect(1, 1, [50, 51])
    pair.target.pages[5:7] = 5
    pair.peer.push(ticket(pair.receiver, 1, 1, [0, 1]), pairs([8, 9]))
    back.push(ticket(pair.sender, 1, 1, [50, 51]), pairs([5, 6]))
    await within(asyncio.gather(there.done(), here.done()))
    assert pair.arrived([8, 9], [0, 1])
    assert (pair.source.pages[50:52] == 5).all()


async def test_an_empty_push_and_an_empty_landing_are_done_at_once(pair: Pair) -> None:
    await within(pair.peer.push(ticket(pair.receiver, 1, 1, [1]), []).done())
    landing = pair.receiver.expect(2, 1, [])
    await within(landing.done())
    await within(landing.peer_gone())
    assert landing.revoke()


# ---- parts of pages: pages [layers, 2, heads, bytes of a head] of two workers that hold other ranges of heads

LAYERS, HEAD_BYTES = 3, 96


def heads(pool: Pool, num_heads: int) -> NDArray[np.uint8]:
    """The pool's pages as [pages, layers, 2, heads, bytes]."""
    return pool.pages.reshape(len(pool.pages), LAYERS, 2, num_heads, HEAD_BYTES)


def segments(first: int, count: int, num_heads: int, target: int = 0, num_targets: int = 2) -> tuple[Segment, ...]:
    """`count` heads from `first` on, of pages of `num_heads`, to the heads from `target` on, of `num_targets`."""
    return tuple(
        Segment((part * num_heads + first) * HEAD_BYTES, (part * num_targets + target) * HEAD_BYTES, count * HEAD_BYTES)
        for part in range(LAYERS * 2)
    )


async def head_pools(network: Network, sender_heads: int, receiver_heads: int) -> Pair:
    size = LAYERS * 2 * HEAD_BYTES
    target, source = Pool(16, receiver_heads * size), Pool(16, sender_heads * size, seed=7)
    receiver, sender = await network.open(target, epoch=11), await network.open(source, epoch=22)
    return Pair(target, source, receiver, sender, await sender.connect(receiver.address, target.memory.page_bytes))


def part_ticket(transport: Transport, reservation: int, pages: Sequence[int], parts: tuple[Segment, ...]) -> Ticket:
    return replace(ticket(transport, reservation, 1, pages), segments=parts)


async def test_heads_of_a_page_land_in_smaller_pages_and_nothing_else_is_written(network: Network) -> None:
    pair = await head_pools(network, 4, 2)
    parts, own, pages = segments(2, 2, 4), [3, 4, 5, 9, 9], [10, 11, 12, 2, 7]
    landing = pair.receiver.expect(1, 1, pages, parts)
    transfer = pair.peer.push(part_ticket(pair.receiver, 1, pages, parts), pairs(own))
    await within(asyncio.gather(landing.done(), transfer.done()))
    assert (heads(pair.target, 2)[pages] == heads(pair.source, 4)[own][:, :, :, 2:4]).all()
    assert pair.untouched_but(pages)


async def test_a_head_lands_in_its_place_in_a_larger_page_and_the_other_heads_stay(network: Network) -> None:
    pair = await head_pools(network, 1, 4)
    parts = segments(0, 1, 1, target=2, num_targets=4)
    landing = pair.receiver.expect(1, 1, [5, 6], parts)
    await within(pair.peer.push(part_ticket(pair.receiver, 1, [5, 6], parts), pairs([0, 1])).done())
    await within(landing.done())
    there = heads(pair.target, 4)
    assert (there[[5, 6], :, :, 2:3] == heads(pair.source, 1)[[0, 1]]).all()
    assert (there[[5, 6]][:, :, :, [0, 1, 3]] == EMPTY).all()
    assert pair.untouched_but([5, 6])


async def test_several_senders_fill_the_same_pages_each_with_its_heads(network: Network) -> None:
    first = await head_pools(network, 2, 4)
    source = Pool(16, first.source.memory.page_bytes, seed=8)
    second = await (await network.open(source)).connect(first.receiver.address, first.target.memory.page_bytes)
    ends: list[Landing | Transfer] = []
    pages = [3, 8, 9]
    for rank, peer in enumerate((first.peer, second)):
        parts = segments(0, 2, 2, target=2 * rank, num_targets=4)
        ends.append(first.receiver.expect(rank, 1, pages, parts))
        ends.append(peer.push(part_ticket(first.receiver, rank, pages, parts), pairs([1, 2, 3])))
    await within(asyncio.gather(*(each.done() for each in ends)))
    there = heads(first.target, 4)[pages]
    assert (there[:, :, :, :2] == heads(first.source, 2)[1:4]).all()
    assert (there[:, :, :, 2:] == heads(source, 2)[1:4]).all()
    assert first.untouched_but(pages)
    assert first.receiver.expect(5, 1, pages).revoke()


async def test_landings_may_share_a_page_only_if_their_segments_do_not_overlap(network: Network) -> None:
    pair = await head_pools(network, 2, 4)
    low, high = (segments(0, 2, 2, target=first, num_targets=4) for first in (0, 2))
    landings = [pair.receiver.expect(1, 1, [3, 4], low), pair.receiver.expect(2, 1, [4, 5], high)]
    for parts in ((), low, segments(0, 2, 2, target=1, num_targets=4)):
        with pytest.raises(ValueError, match="page 4"):
            pair.receiver.expect(3, 1, [4], parts)
    assert landings[0].revoke()
    with pytest.raises(ValueError, match="page 4"):
        pair.receiver.expect(3, 1, [3, 4])
    landings.append(pair.receiver.expect(3, 1, [3, 4], low))
    assert all(landing.revoke() for landing in landings)
    assert pair.receiver.expect(4, 1, [3, 4, 5]).revoke()


OUTSIDE = [Segment(0, 0, 1153), Segment(0, 1100, 100), Segment(0, -1, 5), Segment(0, 0, 0), Segment(0, 8, -4)]


@pytest.mark.parametrize("segment", OUTSIDE)
async def test_a_segment_that_leaves_the_page_is_the_callers_error(network: Network, segment: Segment) -> None:
    pair = await head_pools(network, 4, 2)
    assert pair.target.memory.page_bytes == 1152
    with pytest.raises(ValueError, match=r"reservation 1 .* not inside"):
        pair.receiver.expect(1, 1, [1], [segment])
    with pytest.raises(ValueError, match=r"push .* not inside"):
        pair.peer.push(part_ticket(pair.receiver, 1, [1], (segment,)), [(0, 0)])


async def test_segments_that_overlap_or_leave_the_senders_page_are_the_callers_error(network: Network) -> None:
    pair = await head_pools(network, 4, 2)
    overlapping = (Segment(0, 0, 10), Segment(20, 9, 10))
    with pytest.raises(ValueError, match="overlap"):
        pair.receiver.expect(1, 1, [1], overlapping)
    for parts in (overlapping, (Segment(-1, 0, 5),), (Segment(2300, 0, 5),)):
        with pytest.raises(ValueError, match="push"):
            pair.peer.push(part_ticket(pair.receiver, 1, [1], parts), [(0, 0)])


async def test_whole_pages_do_not_go_into_pages_of_another_size(network: Network) -> None:
    pair = await head_pools(network, 4, 2)
    landing = pair.receiver.expect(1, 1, [1])
    with pytest.raises(ValueError, match="whole page"):
        pair.peer.push(ticket(pair.receiver, 1, 1, [1]), [(0, 0)])
    assert landing.revoke()


async def test_a_sender_that_would_write_other_segments_than_the_landing_expects_is_refused(network: Network) -> None:
    pair = await head_pools(network, 4, 2)
    landing = pair.receiver.expect(1, 1, [1], segments(2, 2, 4))
    with pytest.raises(TransferError, match="other segments"):
        await within(pair.peer.push(part_ticket(pair.receiver, 1, [1], segments(0, 2, 4)), [(0, 0)]).done())
    assert landing.revoke()
    assert pair.target.untouched()


# ---- what is refused


@pytest.mark.parametrize(
    "stale",
    [
        Ticket(epoch=12, reservation=5, generation=1, pages=(1, 2, 3)),
        Ticket(epoch=11, reservation=5, generation=0, pages=(1, 2, 3)),
        Ticket(epoch=11, reservation=5, generation=2, pages=(1, 2, 3)),
        Ticket(epoch=11, reservation=6, generation=1, pages=(1, 2, 3)),
    ],
    ids=["epoch", "older generation", "newer generation", "reservation"],
)
async def test_a_ticket_that_is_not_current_is_refused_and_writes_nothing(pair: Pair, stale: Ticket) -> None:
    landing = pair.receiver.expect(5, 1, [1, 2, 3])
    transfer = pair.peer.push(stale, pairs([0, 1, 2]))
    with pytest.raises(StaleTransferError):
        await within(transfer.done())
    assert pair.target.untouched()
    assert landing.revoke()


async def test_a_refused_push_leaves_the_landing_open_for_the_right_one(pair: Pair) -> None:
    landing = pair.receiver.expect(5, 2, [1, 2])
    with pytest.raises(StaleTransferError):
        await within(pair.peer.push(ticket(pair.receiver, 5, 1, [1, 2]), pairs([0, 1])).done())
    pair.peer.push(ticket(pair.receiver, 5, 2, [1, 2]), pairs([0, 1]))
    await within(landing.done())
    assert pair.arrived([0, 1], [1, 2])


async def test_a_revoked_landing_refuses_and_stays_untouched(pair: Pair) -> None:
    landing = pair.receiver.expect(5, 1, [1, 2])
    assert landing.revoke()
    assert landing.revoke()
    with pytest.raises(TransferError, match="revoked"):
        await within(landing.done())
    await within(landing.peer_gone())
    with pytest.raises(StaleTransferError):
        await within(pair.peer.push(ticket(pair.receiver, 5, 1, [1, 2]), pairs([0, 1])).done())
    assert pair.target.untouched()


async def test_a_finished_landing_refuses_more_pages(pair: Pair) -> None:
    await pair.send(5, [0, 1], [1, 2])
    with pytest.raises(StaleTransferError):
        await within(pair.peer.push(ticket(pair.receiver, 5, 1, [1, 2]), pairs([8, 9])).done())
    assert pair.arrived([0, 1], [1, 2])


async def test_revoking_a_complete_landing_changes_nothing(pair: Pair) -> None:
    landing = pair.receiver.expect(5, 1, [1])
    pair.peer.push(ticket(pair.receiver, 5, 1, [1]), pairs([0]))
    await within(landing.done())
    assert landing.revoke()
    await within(landing.done())


async def test_a_page_can_be_pushed_only_once(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [4, 5, 6])
    current = ticket(pair.receiver, 1, 1, [4, 5, 6])
    await within(pair.peer.push(current, [(0, 0), (1, 1)]).done())
    with pytest.raises(TransferError, match="before") as refusal:
        await within(pair.peer.push(current, [(2, 2), (9, 1)]).done())
    assert not isinstance(refusal.value, StaleTransferError)
    assert pair.arrived([0, 1], [4, 5])
    assert pair.target.untouched([6])
    pair.peer.push(current, [(2, 2)])
    await within(landing.done())


async def test_an_index_outside_the_landing_is_refused_by_the_receiver(pair: Pair) -> None:
    pair.receiver.expect(1, 1, [4, 5])
    longer = ticket(pair.receiver, 1, 1, [4, 5, 6])
    with pytest.raises(TransferError, match="outside the landing"):
        await within(pair.peer.push(longer, pairs([0, 1, 2])).done())
    assert pair.target.untouched()


async def test_a_ticket_with_other_pages_writes_only_to_the_landings(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [4, 8])
    transfer = pair.peer.push(ticket(pair.receiver, 1, 1, [20, 21]), pairs([0, 1]))
    try:
        await within(transfer.done())
    except TransferError:
        assert landing.revoke()
    assert pair.untouched_but([4, 8])


async def test_a_landing_belongs_to_the_first_connection_that_pushes(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [4, 5])
    second = await pair.sender.connect(pair.receiver.address)
    current = ticket(pair.receiver, 1, 1, [4, 5])
    await within(pair.peer.push(current, [(0, 0)]).done())
    with pytest.raises(TransferError, match="another connection"):
        await within(second.push(current, [(1, 1)]).done())
    assert pair.target.untouched([5])
    pair.peer.push(current, [(1, 1)])
    await within(landing.done())


@pytest.mark.parametrize("pages", [[(64, 0)], [(-1, 0)], [(0, 2)], [(0, -1)], [(0, 0), (1, 0)]])
async def test_pages_and_indices_out_of_range_are_the_callers_error(pair: Pair, pages: list[tuple[int, int]]) -> None:
    landing = pair.receiver.expect(1, 1, [4, 5])
    with pytest.raises(ValueError, match="push"):
        pair.peer.push(ticket(pair.receiver, 1, 1, [4, 5]), pages)
    assert landing.revoke()
    assert pair.target.untouched()


@pytest.mark.parametrize("pages", [[64], [-1], [3, 3]])
async def test_a_landing_has_distinct_pages_of_the_pool(pair: Pair, pages: list[int]) -> None:
    with pytest.raises(ValueError, match="reservation 1"):
        pair.receiver.expect(1, 1, pages)


async def test_an_open_landings_pages_cannot_be_in_another(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [3, 4])
    with pytest.raises(ValueError, match="page 4"):
        pair.receiver.expect(2, 1, [4, 5])
    with pytest.raises(ValueError, match="reservation 1"):
        pair.receiver.expect(1, 2, [6])
    assert landing.revoke()
    pair.receiver.expect(1, 2, [3, 4])


async def test_a_reservation_can_be_used_again_after_it_ended(pair: Pair) -> None:
    old = pair.receiver.expect(1, 1, [3, 4])
    assert old.revoke()
    new = pair.receiver.expect(1, 2, [3, 4])
    assert old.revoke()
    pair.peer.push(ticket(pair.receiver, 1, 2, [3, 4]), pairs([0, 1]))
    await within(new.done())
    assert pair.arrived([0, 1], [3, 4])


# ---- cancelling and revoking in flight


async def test_a_cancelled_transfer_ends_in_an_error_and_reads_its_pages_no_more(
    network: Network, go_on: threading.Event
) -> None:
    pair = await connected(network, num_pages=128, page_bytes=1 << 20)
    landing = pair.receiver.expect(1, 1, range(128))
    transfer = pair.peer.push(ticket(pair.receiver, 1, 1, range(128)), pairs(range(128)[::-1]))
    await pair.begun()
    transfer.cancel()
    go_on.set()
    with pytest.raises(TransferError, match="cancelled"):
        await within(transfer.done())
    before = pair.target.pages.copy()
    pair.source.pages[:] = EMPTY - 1
    assert landing.revoke()
    await pair.send(2, [1], [0])
    assert (pair.target.pages[1:] == before[1:]).all()
    assert pair.target.untouched([127])


async def test_cancelling_what_is_done_changes_nothing(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [1])
    transfer = pair.peer.push(ticket(pair.receiver, 1, 1, [1]), pairs([0]))
    await within(transfer.done())
    transfer.cancel()
    await within(landing.done())
    await within(transfer.done())


async def test_a_cancelled_transfer_leaves_the_others_alone(network: Network, go_on: threading.Event) -> None:
    pair = await connected(network, num_pages=96, page_bytes=1 << 20)
    first, second = pair.receiver.expect(1, 1, range(64)), pair.receiver.expect(2, 1, range(64, 96))
    cancelled = pair.peer.push(ticket(pair.receiver, 1, 1, range(64)), pairs(range(64)[::-1]))
    pair.peer.push(ticket(pair.receiver, 2, 1, range(64, 96)), pairs(range(64, 96)))
    cancelled.cancel()
    go_on.set()
    await within(second.done())
    assert pair.arrived(range(64, 96), range(64, 96))
    with pytest.raises(TransferError):
        await within(cancelled.done())
    assert first.revoke()


async def test_a_landing_revoked_in_flight_settles_and_then_stays_as_it_is(
    network: Network, go_on: threading.Event
) -> None:
    pair = await connected(network, num_pages=128, page_bytes=1 << 20)
    landing = pair.receiver.expect(1, 1, range(128))
    transfer = pair.peer.push(ticket(pair.receiver, 1, 1, range(128)), pairs(range(128)[::-1]))
    await pair.begun()
    safe = landing.revoke()
    go_on.set()
    if not safe:
        await within(landing.peer_gone())
        assert landing.revoke()
    pair.target.pages[:] = EMPTY
    with pytest.raises(TransferError, match="revoked"):
        await within(landing.done())
    with pytest.raises(StaleTransferError):
        await within(transfer.done())
    assert pair.target.untouched()


# ---- ends and breaks


async def test_a_sender_that_closes_fails_its_open_landings(pair: Pair) -> None:
    bound, free = pair.receiver.expect(1, 1, [1, 2]), pair.receiver.expect(2, 1, [3])
    await within(pair.peer.push(ticket(pair.receiver, 1, 1, [1, 2]), [(0, 0)]).done())
    await pair.sender.close()
    with pytest.raises(TransferError):
        await within(bound.done())
    await within(bound.peer_gone())
    assert bound.revoke()
    assert free.revoke()
    pair.receiver.expect(3, 1, [1, 2, 3])


async def test_a_receiver_that_closes_fails_what_is_under_way(network: Network, go_on: threading.Event) -> None:
    pair = await connected(network, num_pages=128, page_bytes=1 << 20)
    landing = pair.receiver.expect(1, 1, range(128))
    transfer = pair.peer.push(ticket(pair.receiver, 1, 1, range(128)), pairs(range(128)))
    await pair.begun()
    closing = asyncio.create_task(pair.receiver.close())
    await asyncio.sleep(0)
    go_on.set()
    await within(closing)
    pair.target.pages[:] = EMPTY
    with pytest.raises(TransferError):
        await within(transfer.done())
    with pytest.raises(TransferError):
        await within(landing.done())
    await within(landing.peer_gone())
    await eventually(lambda: not pair.peer.alive)
    assert pair.target.untouched()


async def test_a_closed_connection_fails_its_transfers_and_can_be_made_anew(
    network: Network, go_on: threading.Event
) -> None:
    pair = await connected(network, num_pages=64, page_bytes=1 << 20)
    landing = pair.receiver.expect(1, 1, range(63))
    transfer = pair.peer.push(ticket(pair.receiver, 1, 1, range(63)), pairs(range(63)))
    closing = asyncio.create_task(pair.peer.close())
    await asyncio.sleep(0)
    go_on.set()
    await within(closing)
    await within(pair.peer.close())
    assert not pair.peer.alive
    with pytest.raises(TransferError):
        await within(transfer.done())
    with pytest.raises(TransferError):
        await within(pair.peer.push(ticket(pair.receiver, 1, 1, range(63)), pairs([1])).done())
    landing.revoke()
    await within(landing.peer_gone())
    again = Pair(pair.target, pair.source, pair.receiver, pair.sender, await pair.sender.connect(pair.receiver.address))
    await again.send(2, [5], [63])


async def test_a_closed_transport_refuses_everything(pair: Pair) -> None:
    await pair.sender.close()
    await pair.sender.close()
    with pytest.raises(TransferError, match="closed"):
        pair.sender.expect(1, 1, [1])
    with pytest.raises(TransferError, match="closed"):
        await within(pair.sender.connect(pair.receiver.address))
    with pytest.raises(TransferError):
        await within(pair.peer.push(ticket(pair.receiver, 1, 1, [1]), pairs([1])).done())


async def test_the_address_of_a_closed_transport_is_an_error_soon(pair: Pair) -> None:
    await pair.receiver.close()
    with pytest.raises(TransferError, match="no connection"):
        await within(pair.sender.connect(pair.receiver.address))


async def test_an_invalid_address_is_an_error(pair: Pair) -> None:
    with pytest.raises(TransferError):
        await within(pair.sender.connect(b"nonsense"))


async def test_pages_of_another_size_are_refused_at_connect(network: Network, pair: Pair) -> None:
    other = await network.open(Pool(8, page_bytes=8192))
    with pytest.raises(TransferError, match=r"8192.*4096"):
        await within(other.connect(pair.receiver.address))
    await pair.send(1, [1], [1])


async def test_waiting_can_be_cancelled(pair: Pair) -> None:
    landing = pair.receiver.expect(1, 1, [1])
    waiting = asyncio.create_task(landing.done())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    pair.peer.push(ticket(pair.receiver, 1, 1, [1]), pairs([0]))
    await within(landing.done())


# ---- everything at once


async def test_pushes_cancels_revokes_and_new_connections_never_mix_pages(network: Network) -> None:
    rng = random.Random(0)
    pair = await connected(network, num_pages=256, page_bytes=20_000)
    free, peer = set(range(256)), pair.peer

    async def one(reservation: int) -> None:
        nonlocal peer
        count = rng.randint(1, 12)
        pages, own = rng.sample(sorted(free), count), rng.sample(range(256), count)
        free.difference_update(pages)
        if not peer.alive:
            peer = await pair.sender.connect(pair.receiver.address)
        landing = pair.receiver.expect(reservation, 1, pages)
        current = ticket(pair.receiver, reservation, 1, pages)
        cut = rng.randint(0, count)
        transfers = [peer.push(current, pairs(own[:cut])), peer.push(current, pairs(own[cut:], first=cut))]
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
        match rng.randint(0, 9):
            case 0:
                transfers[rng.randint(0, 1)].cancel()
            case 1:
                landing.revoke()
            case 2:
                await peer.close()
        ends: list[Any] = await within(asyncio.gather(*(t.done() for t in transfers), return_exceptions=True))
        assert all(end is None or isinstance(end, TransferError) for end in ends)
        if ends == [None, None]:
            landing_end = (await within(asyncio.gather(landing.done(), return_exceptions=True)))[0]
            assert landing_end is None or isinstance(landing_end, TransferError)
            if landing_end is None:
                assert pair.arrived(own, pages)
        if not landing.revoke():
            await within(landing.peer_gone())
        pair.target.pages[pages] = EMPTY
        free.update(pages)

    for start in range(0, 150, 15):
        await asyncio.gather(*(one(start + k) for k in range(15)))
    assert pair.target.untouched()
