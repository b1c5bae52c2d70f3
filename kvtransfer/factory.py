"""Which transport a worker uses."""

import logging

from cpd.errors import ConfigError, TransferError
from kvtransfer.base import PoolMemory, Transport

log = logging.getLogger(__name__)


async def create(name: str, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str = "") -> Transport:
    """Opens a pool's transport.

    Args:
        name: `ucx`, `nixl`, or `auto`: nixl if it works here, else ucx; the log says which and why.
        memory: The pool.
        epoch: Of the pool: another one each time a pool is made.
        host: Interface to listen on, an IPv4 address or a name of one; 0.0.0.0 for all.
        advertise_host: What peers connect to; empty takes `host`.

    Raises:
        ConfigError: There is no transport of that name, or nobody could connect to the address given.
        TransferError: It cannot be set up here.
    """
    if name not in ("auto", "nixl", "ucx"):
        raise ConfigError(f"transport: {name!r} is unknown; give auto, nixl or ucx")
    if (advertise_host or host) == "0.0.0.0":
        raise ConfigError("advertise-host: workers that listen on 0.0.0.0 must say which address others reach them at")
    if name == "auto":
        name = await _choose()
    if name == "nixl":
        from kvtransfer.nixl.transport import NixlTransport

        return await NixlTransport.open(memory, epoch=epoch, host=host, advertise_host=advertise_host)
    from kvtransfer.ucx.transport import UcxTransport

    return await UcxTransport.open(memory, epoch=epoch, host=host, advertise_host=advertise_host)


async def _choose() -> str:
    from kvtransfer.nixl.probe import probe

    try:
        await probe("127.0.0.1")
    except TransferError as error:
        log.warning("pages move over ucx, because nixl does not work here: %s", error)
        return "ucx"
    log.info("pages move over nixl: a page has crossed between two of its agents")
    return "nixl"
