"""Starts or joins Ray.

When a process of the local Ray dies:
    gcs_server   supervisors go on, but are not restarted; calls to Ray would block for ever
    raylet       supervisors end, with the processes that they supervise
From then on nothing here calls Ray; `deploy/raydir.py` kills what is left of it.
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
from urllib.parse import urlsplit

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings
from cpd.common.trust import HOW_TO_MAKE_ONE, is_loopback
from deploy.endpoint import LOOPBACK, WILDCARDS
from deploy.placement import grows

_LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's ports are open to all users of the machine, and run any code
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills supervisors when other programs use much memory
    "RAY_worker_niceness": "0",  # default 15: all other programs would take precedence over the workers
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",  # default: all of Ray ends a minute after its gcs_server
}
_CONNECT_S = 5.0
GCS, RAYLET = "gcs_server", "raylet"
OBJECT_STORE_BYTES = 80 << 20
"""The minimum that Ray accepts; we store no objects in it."""


@dataclass(frozen=True, slots=True)
class RaySession:
    """A connection to Ray.

    Attributes:
        addresses: IP address of each live node.
        resources: Total resources of all nodes.
    """

    addresses: tuple[str, ...]
    resources: Mapping[str, float]

    @property
    def hosts(self) -> int:
        """Number of live nodes."""
        return len(self.addresses)

    @property
    def gpus(self) -> float:
        """Total number of GPUs."""
        return self.resources.get("GPU", 0.0)

    @property
    def grows(self) -> bool:
        """True if Ray starts nodes by itself."""
        return grows(self.resources)


@contextlib.contextmanager
def local_ray(namespace: str, temp_dir: str, resources: Mapping[str, float]) -> Iterator[RaySession]:
    """Starts a Ray of one node, which ends with this context, and with this process even if that is killed.

    Args:
        temp_dir: Directory for its files and sockets: a short path below a private directory, because Ray makes its own
            readable to everyone.
    """
    os.environ.update(_LOCAL_ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    with _connected(
        namespace,
        address="local",
        num_cpus=0,
        resources=dict(resources),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=temp_dir,
    ) as session:
        yield session


@contextlib.contextmanager
def joined_ray(namespace: str, address: str) -> Iterator[RaySession]:
    """Connects to the Ray cluster at `address` (`host:port`); `auto` finds the one on this machine.

    Raises:
        ConfigError: There is no such cluster.
    """
    if address != "auto":
        check_reachable(address)
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(_connected(namespace, address=address))
        except ConnectionError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--ray-address {address}: cannot join a Ray cluster there: {reason}") from None
        yield session


def check_hosts(session: RaySession, settings: ClusterSettings, *, embedded: bool, has_own_secret: bool) -> None:
    """Checks that the processes of several hosts can reach each other and Redis.

    Args:
        embedded: Redis is the embedded one.
        has_own_secret: The cluster's secret is in a file that the settings name.

    Raises:
        ConfigError: They can't; the message says what to pass.
    """
    if session.hosts == 1 and not session.grows:
        return
    cluster = "the Ray cluster has several hosts" if session.grows else f"the Ray cluster has {session.hosts} hosts"
    if not has_own_secret:
        raise ConfigError(f"{cluster}, which need a common secret: {HOW_TO_MAKE_ONE}")
    if embedded:
        raise ConfigError(f"{cluster}, which can't share an embedded Redis: start one and pass --redis-url")
    if is_loopback(urlsplit(settings.redis_url).hostname or LOOPBACK):  # a Unix socket has no host
        raise ConfigError(
            f"{cluster}, and --redis-url is an address of this one only: pass one that all hosts can reach"
        )
    if settings.host not in WILDCARDS:
        raise ConfigError(f"{cluster}: pass --host 0.0.0.0 (or ::), so that their processes reach each other")
    if local := [address for address in session.addresses if is_loopback(address)]:
        raise ConfigError(
            f"{cluster}, and one has the address {local[0]}, at which the others can't reach it. It has no default"
            " route: run `ray start` there with --node-ip-address and its address"
        )


def host_names() -> set[str]:
    """Returns the names of all live machines of the Ray to which this process is connected; none if it has died."""
    if dead_process():
        return set()
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeManagerHostname"] for node in nodes if node["Alive"]}


def dead_process() -> str:
    """Returns which process of the local Ray has died, RAYLET before GCS; empty if neither has."""
    from ray._private.worker import _global_node as node

    dead: list[str] = [name for name, _ in node.dead_processes()] if node else []
    return next((name for name in (RAYLET, GCS) if name in dead), "")


@contextlib.contextmanager
def _processes_apart() -> Iterator[None]:
    """Gives the processes that Ray starts meanwhile sessions of their own.

    A closed terminal or a service manager signals the whole process group. Ray would then end before this process has
    ended the cluster in order, and keep it waiting for a minute.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def check_reachable(address: str) -> None:
    """Raises ConfigError if nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(f"--ray-address must be host:port or auto, not {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray-address {address}: nothing answers there: {error}") from None


@contextlib.contextmanager
def _connected(namespace: str, **options: object) -> Iterator[RaySession]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # reads the environment when imported

    try:
        with _processes_apart():
            ray.init(namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **options)  # type: ignore[arg-type]
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        addresses = tuple(node["NodeManagerAddress"] for node in nodes if node["Alive"])
        yield RaySession(addresses, ray.cluster_resources())  # type: ignore[no-untyped-call]
    finally:
        if dead_process():
            atexit.unregister(ray.shutdown)
            atexit.register(os._exit, 1)  # Ray's threads in this process would crash at exit
        else:
            ray.shutdown()
