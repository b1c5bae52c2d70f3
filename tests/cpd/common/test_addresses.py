import socket

import pytest

from cpd.common.addresses import bound_socket, in_url, join_address
from cpd.common.tls import split_address


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "10.0.0.1:80"), ("::1", "[::1]:80"), ("some.host", "some.host:80")]
)
def test_an_ipv6_address_is_in_brackets(host: str, address: str) -> None:
    assert join_address(host, 80) == address
    assert split_address(address) == (host, 80, b"")
    assert in_url(host) == address.removesuffix(":80")


@pytest.mark.parametrize(("host", "clients"), [("127.0.0.1", ["127.0.0.1"]), ("::", ["127.0.0.1", "::1"])])
def test_the_ipv6_wildcard_takes_ipv4_connections_too(host: str, clients: list[str]) -> None:
    with bound_socket(host, 0) as server:
        server.listen()
        for client in clients:
            socket.create_connection((client, server.getsockname()[1])).close()


def test_only_shared_sockets_have_the_same_address() -> None:
    with bound_socket("::1", 0, shared=True) as first:
        port = first.getsockname()[1]
        bound_socket("::1", port, shared=True).close()
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("::1", port)
