"""Tells a receiver on this machine that nothing is being written any more over a broken connection.

Until the receiver knows, or this process has ended, it keeps the pages that may have been in flight in quarantine.
"""

import asyncio
import contextlib

from cpd.common.errors import TransferError
from cpd.common.process_identity import ProcessIdentity
from kvtransfer.addresses import resolve
from kvtransfer.nixl.connection import read_frame
from kvtransfer.nixl.handshake import Address
from kvtransfer.session import frames
from kvtransfer.session.greeting import close_notice
from kvtransfer.session.limits import GREETING_S

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0


async def give_close_notice(where: Address, connection_id: bytes, receiver: ProcessIdentity) -> None:
    """Returns when the receiver has taken note, or does not need to any more.

    Args:
        where: Address of the receiver. It listens as long as it has connections to settle.
        connection_id: Names the broken connection.
        receiver: The receiver's process.
    """
    pause_s = _FIRST_PAUSE_S
    while receiver.alive:
        with contextlib.suppress(TransferError, OSError, EOFError):
            if await _acknowledged(where, connection_id):
                return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _acknowledged(where: Address, connection_id: bytes) -> bool:
    async with asyncio.timeout(GREETING_S):
        try:
            reader, writer = await asyncio.open_connection(await resolve(where.host), where.port)
        except ConnectionRefusedError:
            return True  # it has stopped listening
        try:
            writer.write(frames.encode(close_notice(where.key, connection_id)))
            return isinstance(frames.decode(await read_frame(reader)), frames.CloseAck | frames.Reject)
        finally:
            writer.close()
