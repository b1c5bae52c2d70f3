"""Ports for servers that tests start."""

import random
import socket
from pathlib import Path

MIN_PORT = 20_000
"""Ray uses ports below this."""


def free_port() -> int:
    """A free port on 127.0.0.1, below the ephemeral range.

    The kernel hands an ephemeral port to whoever asks next, possibly before the test's server listens on it.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(MIN_PORT, max(end, MIN_PORT + 10_000))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
