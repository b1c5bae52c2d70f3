"""Which transport a worker uses."""

import logging

from cpd.common.errors import ConfigError, TransferError
from kvtransfer.base import Cost, PoolMemory, Transport
from kvtransfer.probe import probe

log = logging.getLogger(__name__)


async def create(
    name: str | None, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str = "", neighbours: bool = True
) -> Transport:
    """Opens a pool's transport.

    Args:
        name: `ucx`, `nixl`, or `auto`: nixl if it works here, else ucx; the transport's `reason` says why. None: ucx. A
            pool in a GPU's memory has nixl, whether auto or None.
        memory: The pool.
        epoch: Of the pool: another one each time a pool is made.
        host: Interface to listen on, an IPv4 address or a name of one; 0.0.0.0 for all.
        advertise_host: What peers connect to; empty takes `host`.
        neighbours: Whether nixl may write straight into the host memory of another process of this machine.

    Raises:
        ConfigError: There is no transport of that name, or none for such memory, or nobody could connect to the address
            given.
        TransferError: It cannot be set up here.
    """
    if name not in (None, "auto", "nixl", "ucx"):
        raise ConfigError(f"transport: {name!r} is unknown; give auto, nixl or ucx")
    if memory.device is not None and name == "ucx":
        raise ConfigError("transport: ucx moves pages of host memory only; those of a GPU need nixl")
    if (advertise_host or host) == "0.0.0.0":
        raise ConfigError("advertise-host: workers that listen on 0.0.0.0 must say which address others reach them at")
    reason, cost = "", None
    if memory.device is not None and name != "nixl":
        name, reason = "nixl", "pages are in a GPU's memory"
    elif name == "auto":
        name, reason, cost = await _choose()
    transport: Transport
    if name == "nixl":
        from kvtransfer.nixl.transport import NixlTransport

        transport = await NixlTransport.open(
            memory, epoch=epoch, host=host, advertise_host=advertise_host, neighbours=neighbours
        )
    else:
        from kvtransfer.ucx.transport import UcxTransport

        transport = await UcxTransport.open(memory, epoch=epoch, host=host, advertise_host=advertise_host)
    transport.reason, transport.cost = reason, cost
    return transport


async def _choose() -> tuple[str, str, Cost | None]:
    """Name, reason and cost. Loads nothing: two UCX libraries in one process crash it."""
    log.info("trying nixl between two processes")
    try:
        found = await probe("127.0.0.1")
    except TransferError as error:
        log.warning("pages move over ucx, because nixl does not work here: %s", error)
        return "ucx", f"nixl does not work here: {error}", None
    log.info("pages move over nixl: %s", found)
    return "nixl", str(found), found.memory or found.network
