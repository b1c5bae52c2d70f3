"""What the processes of a cluster derive from its secret.

Every use has a key of its own, HMAC-SHA256(secret, label), so that what one use shows says nothing about another. The
secret itself is never sent.
"""

import hmac
import socket
from ipaddress import ip_address

from cpd.common.errors import ConfigError
from cpd.common.settings import SharedSettings

_ADMIN = "admin"


def cluster_secret(settings: SharedSettings) -> "ClusterSecret":
    """Returns the secret of a process's cluster.

    Raises:
        ConfigError: There is none, but other machines can reach this process.
    """
    secret = ClusterSecret(settings.cluster_token.get_secret_value())
    if not secret and not is_loopback(settings.host):
        raise ConfigError(
            f"--host {settings.host} lets other machines reach this process, so its cluster needs a secret: set "
            "CPD_CLUSTER_TOKEN to the same long random text for all its processes, or listen on --host 127.0.0.1"
        )
    return secret


def is_loopback(host: str) -> bool:
    """True if only this machine reaches what listens on `host`."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:  # whoever listens there says so
        return False
    return all(ip_address(address[0]).is_loopback for *_, address in found)


class ClusterSecret:
    """The secret that all processes of a cluster know. An empty one trusts every peer.

    Args:
        text: The secret; long and random, because whoever records a handshake can try guesses at home.
    """

    def __init__(self, text: str) -> None:
        self._secret = text.encode()

    def __bool__(self) -> bool:
        return bool(self._secret)

    def __repr__(self) -> str:
        return f"ClusterSecret({'…' if self else ''})"

    @property
    def admin_key(self) -> str:
        """The key of administration: gRPC calls to workers, and an operator's requests to routers. Empty without a
        secret."""
        return self._key(_ADMIN).hex() if self else ""

    def sign(self, label: str, *parts: bytes) -> bytes:
        """Returns a code that only processes with the secret can make for these parts. Empty without a secret.

        Args:
            label: What the code is for. A code for one purpose is worth nothing for another.
        """
        if not self:
            return b""
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key(label), framed, "sha256")

    def verify(self, code: bytes, label: str, *parts: bytes) -> bool:
        """Returns whether `code` is the one that `sign` makes. Without a secret every code is accepted."""
        return not self or hmac.compare_digest(code, self.sign(label, *parts))

    def _key(self, label: str) -> bytes:
        return hmac.digest(self._secret, f"cpd 1 {label}".encode(), "sha256")
