"""How many connections each client has, by its address.

A connection of a trusted proxy counts for no client. Instead, a request over it counts for the client that the proxy
names, while it is in progress, as a connection would.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from router.errors import too_many

FORWARDED_FOR = b"x-forwarded-for"

CLIENT_PREFIX_V6 = 64
"""A client with IPv6 usually has all addresses with the same first 64 bits."""


class ClientLimit:
    """Counts the connections of each client.

    Args:
        most: Limit for each client; 0: none.
        trusted_proxies: Addresses and networks of proxies whose header `X-Forwarded-For` is believed.
    """

    def __init__(self, most: int, trusted_proxies: Sequence[str] = ()) -> None:
        self._most = most
        self._proxies = [ip_network(name, strict=False) for name in trusted_proxies]
        self._open: Counter[str] = Counter()

    def client(self, peer: str) -> str | None:
        """The client at the other end of a connection; None if it is a trusted proxy, or has no address."""
        address = _address(peer)
        return None if address is None or self._is_proxy(address) else _key(address)

    def forwarded_client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The client of a request over a trusted proxy; None if the connection is the client's own, or none is named.

        Of the names in the header, the last one that is no trusted proxy counts: those before it could be invented. A
        proxy may add a header of its own instead of extending the one that it got.
        """
        if not self._proxies:
            return None
        address = _address(peer)
        if address is None or not self._is_proxy(address):
            return None
        names = b",".join(value for name, value in headers if name == FORWARDED_FOR).decode("latin-1")
        for name in reversed(names.split(",")):
            address = _address(name.strip())
            if address is None:
                return None
            if not self._is_proxy(address):
                return _key(address)
        return None

    def open(self, client: str) -> None:
        """Counts a connection.

        Raises:
            ApiError: The client has too many (429).
        """
        if self._most and self._open[client] >= self._most:
            message = f"You have {self._most} connections already, the most for one client; close or reuse some."
            raise too_many(message, 1.0, kind="requests")
        self._open[client] += 1

    def close(self, client: str) -> None:
        """Stops counting a connection."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def _is_proxy(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._proxies)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """An address, perhaps in brackets or with a port; None if it is none."""
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def _key(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, CLIENT_PREFIX_V6), strict=False))
    return str(address)
