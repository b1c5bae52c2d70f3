"""The version of the messages between processes (`proto/cpd.proto` has the rules), and messages it does not know."""

import logging

from cpd.rpc import cpd_pb2 as pb

log = logging.getLogger(__name__)

MAJOR, MINOR = 1, 2
"""The minor version grows with each field or message kind; the major one with each change that old processes can't
ignore."""

CAPABILITIES: tuple[str, ...] = ()
"""Optional abilities of this version. What a peer does not name is not used with it."""


def own_version() -> pb.Version:
    """Returns this process's version."""
    return pb.Version(major=MAJOR, minor=MINOR)


def incompatible(own: str, peer: str, version: pb.Version) -> str:
    """Returns a sentence for both ends' logs if a peer's version does not fit this one's; else an empty text.

    Args:
        own: What this process is, such as `worker combined-0`.
        peer: What the other one is.
    """
    if version.major == MAJOR:
        return ""
    older = peer if version.major < MAJOR else own
    return (
        f"{own} speaks version {MAJOR}.{MINOR} of the cluster's protocol, {peer} version "
        f"{version.major}.{version.minor}: {older} is older; upgrade it"
    )


class UnknownMessages:
    """The messages of one stream whose kind this version does not know. They are ignored; the first one is logged.

    Args:
        peer: Who sends them.

    Attributes:
        count: Their number.
    """

    def __init__(self, peer: str) -> None:
        self.count = 0
        self._peer = peer

    def ignore(self) -> None:
        """Notes one of them."""
        if not self.count:
            log.info("%s sends messages that this version does not know, and that are ignored", self._peer)
        self.count += 1
