"""Starting or joining Ray.

What happens when a process of the local Ray dies:
    gcs_server   supervisors go on, but none is started again; who asks Ray for something would wait for ever
    raylet       supervisors end, and with them what they supervise
Then nobody asks it any more: what is left of it ends with its directory (`deploy/raydir.py`).
"""

import atexit
import contextlib
import functools
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cpd.common.errors import ConfigError

_LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's ports are open to every user of the machine, and run what they are sent
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill supervisors for the memory of others
    "RAY_worker_niceness": "0",  # by default 15: whatever else runs here would go before the workers
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",  # by default all of Ray ends a minute after its gcs_server
}
_CONNECT_S = 5.0
GCS, RAYLET = "gcs_server", "raylet"
_OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray accepts: no object of ours goes through it."""


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray.

    Attributes:
        hosts: How many nodes it has.
        resources: Of all nodes together.
    """

    hosts: int
    resources: Mapping[str, float]

    @property
    def gpus(self) -> float:
        """GPUs of all nodes together."""
        return self.resources.get("GPU", 0.0)


@contextlib.contextmanager
def local_ray(namespace: str, temp_dir: str, resources: Mapping[str, float]) -> Iterator[RaySession]:
    """A Ray of one node that ends with this context, and with this process however it ends.

    Args:
        temp_dir: For its files and sockets; a short path, in a private directory (Ray opens its own to everyone).
    """
    os.environ.update(_LOCAL_ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    with _connected(
        namespace,
        address="local",
        num_cpus=0,
        resources=dict(resources),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=temp_dir,
    ) as session:
        yield session


@contextlib.contextmanager
def joined_ray(namespace: str, address: str) -> Iterator[RaySession]:
    """A connection to the Ray cluster at `address` (`host:port`); `auto` finds the one on this machine.

    Raises:
        ConfigError: There is none.
    """
    if address != "auto":
        _check_reachable(address)
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(_connected(namespace, address=address))
        except ConnectionError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--ray-address {address}: cannot join a Ray cluster there: {reason}") from None
        yield session


def dead_process() -> str:
    """The process of the local Ray that has died, RAYLET before GCS; empty: neither."""
    from ray._private.worker import _global_node as node

    dead: list[str] = [name for name, _ in node.dead_processes()] if node else []
    return next((name for name in (RAYLET, GCS) if name in dead), "")


@contextlib.contextmanager
def _processes_apart() -> Iterator[None]:
    """What Ray starts meanwhile is in sessions of its own.

    A closed terminal and a service manager send their signal to the whole process group: Ray would be gone before this
    process can end the cluster in order, and keep it waiting for a minute.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def _check_reachable(address: str) -> None:
    """Raises ConfigError where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(f"--ray-address must be host:port or auto, not {address!r}")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray-address {address}: nobody answers there: {error}") from None


@contextlib.contextmanager
def _connected(namespace: str, **options: object) -> Iterator[RaySession]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # reads the environment when imported

    try:
        with _processes_apart():
            ray.init(namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **options)  # type: ignore[arg-type]
        hosts = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
        yield RaySession(hosts, ray.cluster_resources())  # type: ignore[no-untyped-call]
    finally:
        if dead_process():
            atexit.unregister(ray.shutdown)
            atexit.register(os._exit, 1)  # what Ray has in this process crashes at its end
        else:
            ray.shutdown()
