"""Duration of transfers between pools of one process. test_contract.py has the rules."""

import asyncio

import pytest

from kvtransfer.base import Transport
from kvtransfer.local import BATCH_PAGES, LocalNetwork
from tests.kvtransfer.pools import Pool, ticket
from tests.virtual_time import TIMER_LATENESS_S, run_in_virtual_time

FIXED_MS, PAGE_MS = 2.0, 0.5
PAGES = 3 * BATCH_PAGES + 1


def pages_ms(pages: int) -> float:
    return FIXED_MS + PAGE_MS * pages


async def push(sender: Transport, receiver: Transport, reservation: int, first: int) -> None:
    pages = range(first, first + PAGES)
    landing = receiver.expect(reservation, 1, pages)
    peer = await sender.connect(receiver.address)
    peer.push(ticket(receiver, reservation, 1, pages), [(page, index) for index, page in enumerate(pages)])
    await landing.done()


def test_a_transfer_takes_as_long_as_the_network_says_however_many_batches_it_has() -> None:
    async def main() -> None:
        network = LocalNetwork("simulated", pages_ms)
        pools = [Pool(PAGES) for _ in range(2)]
        sender, receiver = (network.create(pool.memory, epoch=1) for pool in pools)
        await push(sender, receiver, 1, 0)

    assert run_in_virtual_time(main())[1] == pytest.approx(pages_ms(PAGES), abs=2 * TIMER_LATENESS_S * 1e3)


def test_a_senders_transfers_share_one_link_and_two_senders_do_not() -> None:
    async def main() -> None:
        network = LocalNetwork("simulated", pages_ms)
        pools = [Pool(3 * PAGES) for _ in range(3)]
        one, other, receiver = (network.create(pool.memory, epoch=1) for pool in pools)
        await asyncio.gather(
            push(one, receiver, 1, 0), push(one, receiver, 2, PAGES), push(other, receiver, 3, 2 * PAGES)
        )

    assert run_in_virtual_time(main())[1] == pytest.approx(2 * pages_ms(PAGES), abs=2 * TIMER_LATENESS_S * 1e3)


def test_by_default_pages_take_no_time() -> None:
    async def main() -> None:
        network = LocalNetwork()
        pools = [Pool(PAGES) for _ in range(2)]
        sender, receiver = (network.create(pool.memory, epoch=1) for pool in pools)
        await push(sender, receiver, 1, 0)

    assert run_in_virtual_time(main())[1] == 0
