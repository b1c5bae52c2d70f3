"""The cluster's HTTP endpoint, as seen from this machine."""

import errno
import socket

from cpd.common.addresses import join_address
from cpd.common.errors import ConfigError

LOOPBACK = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::")


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
