"""The host names that clients may use in the server's URL: protection against DNS rebinding.

A web page can make its own host name resolve to the address of a server on the user's machine. To the browser, page and
server are then the same site, so that the page may send any request and read the response. The `Host` header tells:
the browser sends the page's name in it.

The error is 421 (Misdirected Request, RFC 9110, section 15.5.20): the server does not answer for this host. Nothing
else here uses this status, so it is not mistaken for a malformed request (400) or a missing permission (403).
"""

import re
from collections.abc import Collection

from router.errors import invalid, one_line

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Always allowed: no web page from another machine can have these names."""


class AllowedHosts:
    """Checks `Host` headers, whatever their port.

    Args:
        names: Host names and addresses as in a URL; `*` allows any.
    """

    def __init__(self, names: Collection[str]) -> None:
        any_name = "|".join(re.escape(name) for name in {*LOOPBACK_NAMES, *names})
        self._pattern = None if "*" in names else re.compile(rf"(?:{any_name})(?::\d*)?".encode(), re.IGNORECASE)

    def check(self, host: bytes) -> None:
        """Raises ApiError (421) if a request may not have this `Host` header, which is empty if there is none."""
        if self._pattern is not None and self._pattern.fullmatch(host) is None:
            message = (
                f"This server does not answer for the host '{one_line(host.decode('latin-1'))}'. Use a URL with a host "
                "that it allows, such as localhost, or start it with this host in --allowed-hosts."
            )
            raise invalid(None, message, code="host_not_allowed", status=421)
