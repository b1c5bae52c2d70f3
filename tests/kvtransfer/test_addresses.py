import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import TransferError
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
