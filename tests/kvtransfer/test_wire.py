import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.errors import TransferError
from kvtransfer.ucx import wire

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
reasons = st.text(max_size=100)
frames = st.one_of(
    st.builds(wire.Hello, st.binary(min_size=16, max_size=16), u64),
    st.just(wire.Welcome()),
    st.builds(wire.Reject, st.booleans(), reasons),
    st.builds(
        wire.Offer, u64, u64, u64, u64, st.lists(st.tuples(u32, u32), min_size=1, max_size=wire.MAX_RUNS).map(tuple)
    ),
    st.builds(wire.Grant, u64, u64),
    st.builds(wire.Refuse, u64, st.booleans(), reasons),
    st.builds(wire.Done, u64),
)


@given(frames)
def test_frames_survive_the_wire(frame: wire.Frame) -> None:
    data = wire.encode(frame)
    assert len(data) == wire.FRAME_BYTES
    assert wire.decode(data) == frame


def test_a_reason_of_any_length_fits() -> None:
    refusal = wire.decode(wire.encode(wire.Refuse(1, False, "€" * 5000)))
    assert isinstance(refusal, wire.Refuse)
    assert refusal.reason.startswith("€" * 100)


@given(st.binary(max_size=64))
def test_whatever_a_peer_sends_is_a_frame_or_a_transfer_error(start: bytes) -> None:
    for data in (start, start.ljust(wire.FRAME_BYTES, b"\0")):
        try:
            wire.decode(data)
        except TransferError:
            continue


@given(frames, st.integers(0, 3), st.integers(0, 255))
def test_a_damaged_head_is_a_frame_or_a_transfer_error(frame: wire.Frame, place: int, value: int) -> None:
    data = wire.encode(frame)
    data[place] = value
    try:
        wire.decode(data)
    except TransferError:
        return


def test_another_version_of_the_protocol_is_refused() -> None:
    data = wire.encode(wire.Hello(bytes(16), 1))
    data[4] += 1
    with pytest.raises(TransferError, match="version 2"):
        wire.decode(data)


@given(st.from_regex(r"[a-z0-9.-]{1,80}", fullmatch=True), st.integers(0, 65535), st.binary(min_size=16, max_size=16))
def test_addresses_survive_the_wire(host: str, port: int, key: bytes) -> None:
    address = wire.Address(host, port, key)
    assert wire.Address.decode(address.encode()) == address


@given(st.binary(max_size=64))
def test_whatever_is_no_address_is_a_transfer_error(data: bytes) -> None:
    with pytest.raises(TransferError, match="not the address"):
        wire.Address.decode(data)


def test_an_address_cut_short_is_a_transfer_error() -> None:
    address = wire.Address("127.0.0.1", 4000, bytes(16)).encode()
    with pytest.raises(TransferError, match="not the address"):
        wire.Address.decode(address[:20])
