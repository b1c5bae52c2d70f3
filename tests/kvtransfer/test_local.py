"""How long pages are under way between pools of one process. The rules are in test_contract.py."""

import asyncio
import selectors
from collections.abc import Coroutine

import pytest

from kvtransfer.base import Transport
from kvtransfer.local import BATCH_PAGES, LocalNetwork
from tests.kvtransfer.pools import Pool, ticket

FIXED_MS, PAGE_MS = 2.0, 0.5
PAGES = 3 * BATCH_PAGES + 1
LATE_S = 1e-4


class JumpingSelector(selectors.DefaultSelector):
    """Sets its time ahead, and a little too far, instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self.now_s += timeout + LATE_S
        return ready


def elapsed_ms(main: Coroutine[None, None, None]) -> float:
    """How long it takes in a loop whose time passes only while everybody sleeps."""
    selector = JumpingSelector()

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main)
    return selector.now_s * 1e3


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

    assert elapsed_ms(main()) == pytest.approx(pages_ms(PAGES), abs=2 * LATE_S * 1e3)


def test_a_senders_transfers_share_one_link_and_two_senders_do_not() -> None:
    async def main() -> None:
        network = LocalNetwork("simulated", pages_ms)
        pools = [Pool(3 * PAGES) for _ in range(3)]
        one, other, receiver = (network.create(pool.memory, epoch=1) for pool in pools)
        await asyncio.gather(
            push(one, receiver, 1, 0), push(one, receiver, 2, PAGES), push(other, receiver, 3, 2 * PAGES)
        )

    assert elapsed_ms(main()) == pytest.approx(2 * pages_ms(PAGES), abs=2 * LATE_S * 1e3)


def test_by_default_pages_take_no_time() -> None:
    async def main() -> None:
        network = LocalNetwork()
        pools = [Pool(PAGES) for _ in range(2)]
        sender, receiver = (network.create(pool.memory, epoch=1) for pool in pools)
        await push(sender, receiver, 1, 0)

    assert elapsed_ms(main()) == 0
