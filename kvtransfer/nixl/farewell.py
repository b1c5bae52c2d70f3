"""Tells a receiver of this machine that nothing is being written any more over a connection that broke.

Until it knows, or this process is gone, it keeps the pages that may have been under way in quarantine.
"""

import asyncio
import contextlib

from cpd.common.errors import TransferError
from kvtransfer.addresses import resolve
from kvtransfer.nixl.details import Address
from kvtransfer.nixl.link import read_frame
from kvtransfer.nixl.process import ProcessIdentity
from kvtransfer.session import frames
from kvtransfer.session.limits import GREETING_S

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0


async def farewell(where: Address, connection: bytes, receiver: ProcessIdentity) -> None:
    """Returns when the receiver has heard it, or need not hear it any more.

    Args:
        where: It listens for as long as it has connections to settle.
        connection: See `frames.Over`.
        receiver: Its process.
    """
    pause_s = _FIRST_PAUSE_S
    while receiver.alive:
        with contextlib.suppress(TransferError, OSError, EOFError):
            if await _heard(where, connection):
                return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _heard(where: Address, connection: bytes) -> bool:
    async with asyncio.timeout(GREETING_S):
        try:
            reader, writer = await asyncio.open_connection(await resolve(where.host), where.port)
        except ConnectionRefusedError:
            return True  # it listens no more
        try:
            writer.write(frames.encode(frames.Over(where.key, connection)))
            return isinstance(frames.decode(await read_frame(reader)), frames.Heard | frames.Reject)
        finally:
            writer.close()
