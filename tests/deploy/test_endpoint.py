import socket

import pytest

from cpd.common.errors import ConfigError
from deploy.endpoint import pick_port, url_of


def test_a_free_port_is_picked_for_zero() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", pick_port("127.0.0.1", 0)))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"):
            pick_port("127.0.0.1", port)


@pytest.mark.parametrize(("host", "message"), [("no.such.host.invalid", "not a known"), ("192.0.2.77", "cannot")])
def test_an_address_of_another_machine_is_refused(host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick_port(host, 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("10.1.2.3", "http://10.1.2.3:1"), ("::1", "http://[::1]:1")],
)
def test_the_url_is_reachable_from_this_machine(host: str, url: str) -> None:
    assert url_of(host, 1) == url
