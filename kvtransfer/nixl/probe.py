"""Whether NIXL works here: a page crosses between two of its agents."""

import asyncio
import ctypes

from cpd.errors import TransferError
from kvtransfer.base import PoolMemory, Ticket
from kvtransfer.nixl.transport import NixlTransport

_PAGE_BYTES = 65_536
_PATIENCE_S = 20.0


async def probe(host: str) -> None:
    """Takes about a second, mostly NIXL's first look at the machine.

    Args:
        host: IPv4 address to listen on, or a name of one.

    Raises:
        TransferError: It does not; the message says why.
        ConfigError: `host` is not this machine's.
    """
    source, target = (ctypes.create_string_buffer(content * _PAGE_BYTES, _PAGE_BYTES) for content in (b"x", b"-"))
    sender, receiver = [
        await NixlTransport.open(PoolMemory(ctypes.addressof(pool), 1, _PAGE_BYTES), epoch=0, host=host)
        for pool in (source, target)
    ]
    try:
        async with asyncio.timeout(_PATIENCE_S):
            peer = await sender.connect(receiver.address)
            landing = receiver.expect(0, 0, [0])
            await peer.push(Ticket(epoch=0, reservation=0, generation=0, pages=(0,)), [(0, 0)]).done()
            await landing.done()
    except TimeoutError:
        raise TransferError(f"a page took more than {_PATIENCE_S:g} s between two agents of this process") from None
    finally:
        await sender.close()
        await receiver.close()
    if target.raw != source.raw:
        raise TransferError("a page arrived damaged between two agents of this process")
