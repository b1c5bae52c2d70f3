"""Kills peers during pushes, many times: `python -m tests.kvtransfer.soak nixl --rounds 200`.

This process keeps one transport. In each round another process connects, or is connected to, pushes or is pushed to,
and is killed after a random time. Then this side must notice, its pages must be left alone, and a push between two live
transports must still work. In the end the process must hold no more threads, files and memory than early on.
Prints a line every ten rounds and exits with 1 if something was wrong; a crash shows in the exit code.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import sys
import time

import kvtransfer
from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.base import Transport
from tests.kvtransfer.pools import EMPTY, Pool, ticket
from tests.kvtransfer.remote import Remote, within
from tests.waiting import eventually

_SETTLED_AFTER = 20  # rounds, after which nothing may grow
_PAGES, _PAGE_BYTES = 96, 1 << 18
_LONGEST_S = 0.02  # about the duration of a push
_GROWTH_BYTES = 32 << 20


class WrongError(Exception):
    """A check failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Resources that this process holds."""

    files: int
    threads: int
    bytes: int

    @classmethod
    def now(cls) -> "Held":
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident)


async def killed_sender(transport: Transport, pool: Pool, remote: Remote, number: int) -> str:
    """Kills a sender; its landing must fail or be complete, and its pages be safe."""
    await remote.connect(transport.address)
    landing = transport.expect(number, 1, range(_PAGES))
    remote.push(ticket(transport, number, 1, range(_PAGES)), [(k, k) for k in range(_PAGES)])
    await asyncio.sleep(random.random() * _LONGEST_S)
    await remote.kill()
    outcome = "complete"
    if pool.untouched():
        landing.revoke()  # perhaps the sender offered nothing: then the landing knows no sender that could fail
    try:
        await within(landing.done())
    except TransferError:
        outcome = "failed"
    await within(landing.peer_gone())
    if not landing.revoke():
        raise WrongError("a landing is not settled though its peer is gone")
    pool.pages[:] = EMPTY
    return outcome


async def killed_receiver(transport: Transport, pool: Pool, remote: Remote, number: int) -> str:
    """Kills a receiver; the push must fail or be complete."""
    peer = await within(transport.connect(await remote.address()))
    pushed = peer.push(await remote.expect(range(_PAGES)), [(k, k) for k in range(_PAGES)])
    await asyncio.sleep(random.random() * _LONGEST_S)
    await remote.kill()
    outcome = "complete"
    try:
        await within(pushed.done())
    except TransferError:
        outcome = "failed"
    await within(peer.close())
    return outcome


async def works(transport: Transport, pool: Pool, other: Transport, source: Pool, number: int) -> None:
    peer = await within(other.connect(transport.address))
    landing = transport.expect(number, 2, [7, 80])
    await within(peer.push(ticket(transport, number, 2, [7, 80]), [(3, 0), (2, 1)]).done())
    await within(landing.done())
    if not (pool.pages[[7, 80]] == source.pages[[3, 2]]).all():
        raise WrongError("pages between live transports arrived damaged")
    pool.pages[[7, 80]] = EMPTY
    await within(peer.close())
    if not pool.untouched():
        raise WrongError("a page outside the landing was written")


async def soak(name: str, rounds: int, network: bool) -> None:
    if network:
        elsewhere = dataclasses.replace(ProcessIdentity.own(), boot=bytes(16))
        ProcessIdentity.own = staticmethod(lambda: elsewhere)  # type: ignore[method-assign]
    pool, source = Pool(_PAGES, _PAGE_BYTES), Pool(4, _PAGE_BYTES, seed=6)
    transport = await kvtransfer.create(name, pool.memory, epoch=1, host="127.0.0.1")
    other = await kvtransfer.create(name, source.memory, epoch=2, host="127.0.0.1")
    early: Held | None = None
    started = time.monotonic()
    for number in range(rounds):
        remote = await Remote.start(name, seed=number, num_pages=_PAGES, page_bytes=_PAGE_BYTES)
        what = random.choice([killed_sender, killed_receiver])
        outcome = await what(transport, pool, remote, number)
        await works(transport, pool, other, source, number)
        if number + 1 == _SETTLED_AFTER:
            early = Held.now()
        if number % 10 == 9:
            print(
                f"{number + 1} of {rounds}, {time.monotonic() - started:.0f} s: {what.__name__} {outcome}", Held.now()
            )
    if early is not None:

        def held() -> bool:
            now = Held.now()
            few = now.files <= early.files and now.threads <= early.threads
            return few and now.bytes <= early.bytes + _GROWTH_BYTES

        await eventually(held)
    await within(transport.close())
    await within(other.close())
    print(f"{rounds} rounds without a fault, {Held.now()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("transport", choices=["nixl", "ucx"])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--network", action="store_true", help="nixl as between two machines")
    arguments = parser.parse_args()
    sys.setswitchinterval(1e-4)
    asyncio.run(soak(arguments.transport, arguments.rounds, arguments.network))
