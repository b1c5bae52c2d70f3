"""The cluster's HTTP endpoint, as seen from this machine."""

import errno
import socket
from collections.abc import Collection, Mapping
from typing import Any

import httpx2
import orjson

from cpd.common.addresses import join_address
from cpd.common.errors import ConfigError, CPDError

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::")
_TIMEOUT_S = 5.0


def pick_port(host: str, port: int) -> int:
    """Returns `port`, or a free one for 0.

    Raises:
        ConfigError: The port is in use, or `host` is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            picked: int = probe.getsockname()[1]
            return picked
    except socket.gaierror:
        raise ConfigError(f"--host {host} is not a known address") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from None
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {error.strerror}") from None


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Returns the URL at which this machine reaches a server that listens on `host`."""
    return f"{'https' if tls else 'http'}://{join_address(LOOPBACK if host in WILDCARDS else host, port)}"


def read_cluster(url: str, admin_key: str) -> dict[str, Any]:
    """Asks the endpoint for `/cluster`.

    Args:
        admin_key: The cluster's admin key.

    Raises:
        CPDError: The endpoint does not answer, or answers with an error.
    """
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:  # ignores http_proxy: the endpoint is within the cluster
        answer = httpx2.get(f"{url}/cluster", headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=False)
        answer.raise_for_status()
        cluster: dict[str, Any] = orjson.loads(answer.content)
        return cluster
    except httpx2.HTTPStatusError as error:
        response = error.response
        raise CPDError(f"{url}/cluster answers {response.status_code} {response.reason_phrase}") from None
    except (httpx2.HTTPError, ValueError) as error:
        raise CPDError(f"{url} does not answer: {error}. If the cluster has just been started, try again") from None


def has_workers(url: str, admin_key: str, pids: Mapping[str, int], routers: Collection[str]) -> bool:
    """True if all these routers can place requests on all these workers (process id by name)."""
    try:
        workers = read_cluster(url, admin_key)["workers"]
    except CPDError:
        return False
    ready = {worker["id"]: worker["pid"] for worker in workers if _is_ready_at(worker, routers)}
    return pids.items() <= ready.items()


def _is_ready_at(worker: dict[str, Any], routers: Collection[str]) -> bool:
    seen = worker["routers"]
    return all(router in seen and seen[router]["state"] == "ready" for router in routers)
