"""What the processes of a cluster derive from its secret.

Every use has a key of its own, HMAC-SHA256(secret, label), so that what one use shows says nothing about another. The
secret itself is never sent.
"""

import hmac
import logging
import os
import socket
import stat
from ipaddress import ip_address
from pathlib import Path

from cpd.common.errors import ConfigError
from cpd.common.settings import MemberSettings

log = logging.getLogger(__name__)

LEAST_SECRET_CHARS = 16

HOW_TO_MAKE_ONE = (
    "write one to a file (umask 077; head -c 32 /dev/urandom | base64 > FILE), copy it to every machine, and pass "
    "--secret-file FILE everywhere"
)

_ADMIN = "admin"


def cluster_secret(settings: MemberSettings) -> "ClusterSecret":
    """Returns the secret of a process's cluster.

    Raises:
        ConfigError: It can't be read, or there is none and other machines can reach this process.
    """
    secret = read_secret(settings.secret_file) if settings.secret_file is not None else ClusterSecret("")
    if not secret and not is_loopback(settings.host):
        raise ConfigError(
            f"--host {settings.host} lets other machines reach this process, so its cluster needs a secret: "
            f"{HOW_TO_MAKE_ONE}, or listen on --host 127.0.0.1"
        )
    return secret


def read_secret(file: Path) -> "ClusterSecret":
    """Reads a secret from a file; white space around it does not count.

    Raises:
        ConfigError: The file can't be read, or its secret is too short.
    """
    try:
        text = file.read_text().strip()
        others = _others_can_read(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise ConfigError(f"--secret-file {file} can't be read: {reason}") from None
    if len(text) < LEAST_SECRET_CHARS:
        raise ConfigError(
            f"the secret in --secret-file {file} is shorter than {LEAST_SECRET_CHARS} characters and could be guessed; "
            f"{HOW_TO_MAKE_ONE}"
        )
    if others:
        log.warning("other users of this machine can read the cluster's secret: chmod 600 %s", file)
    return ClusterSecret(text)


def _others_can_read(file: Path) -> bool:
    """True if other users can read a file, more of them than necessary.

    systemd and Kubernetes give a process a file of root that only the process's group can read.
    """
    status = file.stat()
    group = status.st_mode & stat.S_IRGRP and status.st_uid == os.geteuid()
    return bool(group or status.st_mode & stat.S_IROTH)


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
        return self.key(_ADMIN).hex() if self else ""

    def sign(self, label: str, *parts: bytes) -> bytes:
        """Returns a code that only processes with the secret can make for these parts. Empty without a secret.

        Args:
            label: What the code is for. A code for one purpose is worth nothing for another.
        """
        if not self:
            return b""
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self.key(label), framed, "sha256")

    def verify(self, code: bytes, label: str, *parts: bytes) -> bool:
        """Returns whether `code` is the one that `sign` makes. Without a secret every code is accepted."""
        return not self or hmac.compare_digest(code, self.sign(label, *parts))

    def signed(self, label: str, text: bytes, *parts: bytes) -> bytes:
        """Returns a text with the code of `parts` and of itself in front, in hex."""
        return b"%b %b" % (self.sign(label, *parts, text).hex().encode(), text)

    def verified(self, label: str, value: bytes, *parts: bytes) -> bytes | None:
        """Returns the text that `signed` was given with this label and these parts; None if it was not."""
        code, _, text = value.partition(b" ")
        try:
            return text if self.verify(bytes.fromhex(code.decode()), label, *parts, text) else None
        except ValueError:
            return None

    def key(self, label: str) -> bytes:
        """Returns the key for one use (32 bytes)."""
        return hmac.digest(self._secret, f"cpd 1 {label}".encode(), "sha256")


NO_SECRET = ClusterSecret("")
