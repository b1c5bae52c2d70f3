"""Which transport a worker uses."""

import contextlib
import logging

from cpd.common.errors import ConfigError, TransferError
from kvtransfer.addresses import interface_of, rdma_ports, resolve
from kvtransfer.base import PoolMemory, Transport
from kvtransfer.probe import probe

log = logging.getLogger(__name__)


async def create(
    name: str, memory: PoolMemory, *, epoch: int, host: str, advertise_host: str = "", same_host: bool = True
) -> Transport:
    """Opens a pool's transport.

    Args:
        name: `ucx`, `nixl`, or `auto` for nixl if it works here, else ucx (the transport's `reason` says why). A pool
            in GPU memory uses nixl for auto.
        memory: The pool.
        epoch: Epoch of the pool, a new one each time a pool is created.
        host: Interface to listen on, as an IP address or host name; 0.0.0.0 or :: for all.
        advertise_host: Host that peers connect to; `host` if empty.
        same_host: True if it may write directly into the host memory of other processes of this machine.

    Raises:
        ConfigError: The name is unknown, ucx was asked to move GPU memory or to use IPv6, or peers could not connect to
            the address.
        TransferError: The transport cannot be set up here.
    """
    if name not in ("auto", "nixl", "ucx"):
        raise ConfigError(f"transport: {name!r} is unknown; give auto, nixl or ucx")
    if memory.device is not None and name == "ucx":
        raise ConfigError("transport: ucx moves pages of host memory only; those of a GPU need nixl")
    if (advertise_host or host) in ("0.0.0.0", "::"):
        raise ConfigError(f"advertise-host: workers that listen on {host} must say which address others reach them at")
    try:
        ip = await resolve(host)
    except TransferError as error:
        raise ConfigError(f"host: {error}") from None
    advertise_host = advertise_host or ip
    device_host = await _device_host(ip, advertise_host)
    reason = ""
    if name == "auto":
        name, reason = (
            ("nixl", "pages are in a GPU's memory") if memory.device is not None else await _choose(device_host)
        )
    transport: Transport
    if name == "nixl":
        from kvtransfer.nixl.transport import NixlTransport

        transport = await NixlTransport.open(
            memory, epoch=epoch, host=ip, advertise_host=advertise_host, device_host=device_host, same_host=same_host
        )
    else:
        if ":" in ip or ":" in advertise_host:
            raise ConfigError("transport: ucx can't listen on IPv6 addresses; use nixl, or IPv4")
        from kvtransfer.ucx.transport import UcxTransport

        transport = await UcxTransport.open(
            memory, epoch=epoch, host=ip, advertise_host=advertise_host, device_host=device_host, same_host=same_host
        )
    transport.reason = reason
    return transport


async def _device_host(host: str, advertise_host: str) -> str:
    """The address whose interface pages use: the one that peers know, if `host` is a wildcard and it is a local one.

    Others, such as bridges of containers, may have the same address on several machines.
    """
    if host in ("0.0.0.0", "::"):
        with contextlib.suppress(TransferError, ConfigError):
            advertised = await resolve(advertise_host)
            interface_of(advertised)
            return advertised
    return host


async def _choose(host: str) -> tuple[str, str]:
    """Name and reason. Loads neither library: a process with both of their UCX versions crashes."""
    try:
        await probe(host)
    except TransferError as error:
        log.warning("pages move over ucx, because nixl does not work here: %s", error)
        return "ucx", f"nixl does not work here: {error}"
    ports = rdma_ports()
    network = f"RDMA ({', '.join(ports)})" if ports else "TCP (no RDMA port has a link)"
    return "nixl", f"pages go through memory between processes of one machine, over {network} between machines"
