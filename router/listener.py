"""The socket that a router listens on: its supervisor's, or its own if it was started by hand."""

import os
import socket
from collections.abc import Mapping

from cpd.common.addresses import bound_socket, join_address
from cpd.common.errors import ConfigError

LISTENER_FD = "CPD_LISTENER_FD"
"""Environment variable with the file descriptor of the supervisor's socket (`deploy/listener.py`)."""


def inherited(environment: Mapping[str, str] = os.environ) -> socket.socket | None:
    """Returns the supervisor's socket, if a supervisor has passed one."""
    if LISTENER_FD not in environment:
        return None
    listener = socket.socket(fileno=int(environment[LISTENER_FD]))
    listener.set_inheritable(False)
    return listener


def listen(host: str, port: int, *, shared: bool = True) -> socket.socket:
    """Opens a socket to listen on.

    Several routers can have a `shared` socket for the same address: the kernel spreads connections over them.

    Raises:
        ConfigError: The address can't be used.
    """
    try:
        listener = bound_socket(host, port, shared=shared)
    except OSError as error:
        raise ConfigError(f"can't listen on {join_address(host, port)}: {error.strerror or error}") from None
    # inherited by accepted connections: a dead client machine is noticed within a minute
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
