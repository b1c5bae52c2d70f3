import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.errors import TransferError
from kvtransfer.session import frames

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
reasons = st.text(max_size=100)
some_bytes = st.binary(max_size=300)
codes = st.binary(min_size=16, max_size=16)
some_frames = st.one_of(
    st.builds(frames.Hello, codes, codes, u64, some_bytes),
    st.builds(frames.Welcome, codes, codes, some_bytes),
    st.builds(frames.Proof, codes),
    st.builds(frames.Reject, st.booleans(), reasons),
    st.builds(frames.Offer, u64, u64, u64, u64, st.lists(st.tuples(u32, u32), max_size=300).map(tuple)),
    st.builds(frames.Grant, u64, st.lists(u64, max_size=300).map(tuple)),
    st.builds(frames.Refuse, u64, st.booleans(), reasons),
    st.builds(frames.Sent, u64),
    st.builds(frames.Done, u64),
    st.builds(frames.Stop, reasons),
    st.builds(frames.CloseNotice, codes, codes),
    st.just(frames.CloseAck()),
    st.builds(frames.Pages, u64, some_bytes),
)


@given(some_frames)
def test_frames_survive_the_wire(frame: frames.Frame) -> None:
    data = frames.encode(frame)
    rest = data[frames.PREFIX_BYTES :]
    assert frames.length(data[: frames.PREFIX_BYTES]) == len(rest)
    assert frames.decode(rest) == frame


def test_a_reason_of_any_length_fits() -> None:
    data = frames.encode(frames.Refuse(1, False, "€" * 5000))
    refusal = frames.decode(data[frames.PREFIX_BYTES :])
    assert isinstance(refusal, frames.Refuse)
    assert refusal.reason.startswith("€" * 100)


@given(st.binary(max_size=300))
def test_random_bytes_are_a_frame_or_a_transfer_error(data: bytes) -> None:
    with contextlib.suppress(TransferError):
        frames.decode(data)


@given(some_frames, st.integers(0, 8), st.integers(0, 255))
def test_a_damaged_frame_is_a_frame_or_a_transfer_error(frame: frames.Frame, place: int, value: int) -> None:
    data = bytearray(frames.encode(frame)[frames.PREFIX_BYTES :])
    data[min(place, len(data) - 1)] = value
    with contextlib.suppress(TransferError):
        frames.decode(bytes(data))


@pytest.mark.parametrize("size", [0, frames.MAX_FRAME_BYTES + 1])
def test_a_frame_of_an_impossible_length_is_refused(size: int) -> None:
    with pytest.raises(TransferError, match="bytes"):
        frames.length(size.to_bytes(frames.PREFIX_BYTES, "little"))


def test_another_version_of_the_protocol_is_refused() -> None:
    data = bytearray(frames.encode(frames.Hello(bytes(16), bytes(16), 1))[frames.PREFIX_BYTES :])
    data[1] += 1
    with pytest.raises(TransferError, match="speaks version"):
        frames.decode(bytes(data))
