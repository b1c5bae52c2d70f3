import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import ConfigError, TransferError
from kvtransfer.addresses import interface_of, network_devices, resolve
from kvtransfer.nixl.handshake import Address


@given(st.from_regex(r"[a-z0-9.-]{1,80}", fullmatch=True), st.integers(0, 65535), st.binary(min_size=16, max_size=16))
def test_addresses_survive_the_wire(host: str, port: int, key: bytes) -> None:
    address = Address(host, port, key)
    assert Address.decode(address.encode()) == address


@given(st.binary(max_size=64))
def test_random_bytes_are_not_an_address(data: bytes) -> None:
    with pytest.raises(TransferError, match="not the address"):
        Address.decode(data)


def test_an_address_cut_short_is_a_transfer_error() -> None:
    address = Address("127.0.0.1", 4000, bytes(16)).encode()
    with pytest.raises(TransferError, match="not the address"):
        Address.decode(address[:20])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_loopback_addresses_have_the_loopback_interface_alone(host: str) -> None:
    assert network_devices(host) == ("lo",)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_leaves_the_choice_of_devices_to_the_library(host: str) -> None:
    assert network_devices(host) == ()


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])
def test_an_address_of_another_machine_has_no_interface(host: str) -> None:
    with pytest.raises(ConfigError, match=f"no network interface has the address {host}"):
        interface_of(host)


async def test_names_and_addresses_are_resolved() -> None:
    assert await resolve("::1") == "::1"
    assert await resolve("10.0.0.1") == "10.0.0.1"
    assert await resolve("localhost") == "127.0.0.1"  # which is asked for first where there are both
    with pytest.raises(TransferError, match="has no IP address"):
        await resolve("no.such.host.invalid")
