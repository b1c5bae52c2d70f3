"""Green Contexts against a fake driver, without a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.performance.split import Device, lane_splits
from engine.execution.cuda.driver import CudaError, CudaUnavailableError
from engine.execution.cuda.greenctx import GreenContexts, PartitionPair, UnusablePartitionError
from tests.engine.execution.cuda.fakes import FakeDriver

H200 = range(132)


def sms(driver: FakeDriver, pair: PartitionPair) -> tuple[frozenset[int], frozenset[int]]:
    return driver.sms_of(pair.prefill.handle), driver.sms_of(pair.decode.handle)


def test_every_lane_split_is_a_disjoint_pair_of_the_whole_device() -> None:
    driver = FakeDriver()
    with GreenContexts(driver) as contexts:
        for split in lane_splits(contexts.units):
            pair = contexts.open(int(split.decode))
            prefill, decode = sms(driver, pair)
            assert not prefill & decode
            assert prefill | decode == set(H200)
            assert (pair.prefill.sms, pair.decode.sms) == (split.prefill, split.decode) == (len(prefill), len(decode))
    assert not driver.contexts
    assert not driver.streams


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 16), st.data())
def test_lane_splits_open_and_others_are_refused_for_any_granularity(
    units: int, step: int, minimum: int, data: st.DataObject
) -> None:
    step, minimum = min(step, units), min(minimum, units)
    if units < 2 * minimum:
        with pytest.raises(CudaUnavailableError, match="too few"):
            GreenContexts(FakeDriver(units, step, minimum))
        return
    driver = FakeDriver(units, step, minimum, major=8)
    possible = {split.decode for split in lane_splits(Device(units, step, minimum))}
    with GreenContexts(driver) as contexts:
        size = data.draw(st.integers(-1, units + 1))
        if size in possible:
            assert contexts.open(size).decode.sms == size
        else:
            with pytest.raises(ValueError, match="can't be partitioned"):
                contexts.open(size)
    assert not driver.contexts


def test_pairs_are_prepared_as_close_to_the_requested_shares_as_possible() -> None:
    with GreenContexts(FakeDriver()) as contexts:
        pairs = contexts.prepare([0.5, 1 / 8, 1 / 4, 0.51, 0.0])
    assert [pair.decode.sms for pair in pairs] == [8, 16, 32, 64, 68]
    assert [pair.prefill.sms for pair in pairs] == [124, 116, 100, 68, 64]


def test_a_partition_without_room_for_a_cluster_is_not_prepared(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    driver.no_clusters_on = 16
    with GreenContexts(driver) as contexts:
        with pytest.raises(UnusablePartitionError, match="16 SMs"):
            contexts.open(16)
        assert not driver.contexts
        assert [pair.decode.sms for pair in contexts.prepare([1 / 8, 1 / 4])] == [32]
    assert "16 of 132 SMs" in caplog.text


def test_partitions_are_usable_if_clusters_cannot_be_checked(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    with GreenContexts(driver) as contexts:
        driver.fail_at = len(driver.calls) + 3  # split, context, stream, then the question
        assert contexts.open(16).decode.sms == 16
        assert driver.calls[int(driver.fail_at)] == "cuOccupancyMaxActiveClusters"
    assert "can't check" in caplog.text


def test_a_split_that_the_driver_rounds_is_refused() -> None:
    driver = FakeDriver(rounds=True)
    with (
        GreenContexts(driver) as contexts,
        pytest.raises(UnusablePartitionError, match="splits off 24 of 132 SMs and leaves 108; requested were 16"),
    ):
        contexts.open(16)
    assert not driver.contexts


def test_a_split_that_this_chip_lacks_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    driver.most = 112
    with GreenContexts(driver) as contexts:
        with pytest.raises(UnusablePartitionError, match="can't split off 120 of 132 SMs"):
            contexts.open(12)
        assert [pair.decode.sms for pair in contexts.prepare([12 / 132, 1 / 4])] == [32]
    assert "12 of 132 SMs" in caplog.text


def calls_of_open() -> list[str]:
    driver = FakeDriver()
    with GreenContexts(driver) as contexts:
        before = len(driver.calls)
        contexts.open(16)
        return driver.calls[before:]


@pytest.mark.parametrize("nth", [n for n, call in enumerate(calls_of_open()) if "Occupancy" not in call])
def test_a_failed_call_leaves_only_earlier_pairs(nth: int) -> None:
    driver = FakeDriver()
    contexts = GreenContexts(driver)
    kept = contexts.open(64)
    driver.fail_at = len(driver.calls) + nth
    with pytest.raises(CudaError, match=driver.calls[3 + nth]):
        contexts.open(16)
    assert len(driver.contexts) == len(driver.streams) == 2
    assert driver.sms_of(kept.prefill.handle) | driver.sms_of(kept.decode.handle) == set(H200)
    contexts.open(24)
    contexts.close()
    assert not driver.contexts


def test_if_one_pair_fails_none_is_prepared() -> None:
    driver = FakeDriver()
    contexts = GreenContexts(driver)
    driver.fail_at = len(driver.calls) + len(calls_of_open()) + 1
    with pytest.raises(CudaError, match="cuGreenCtxCreate"):
        contexts.prepare([1 / 8, 1 / 2])
    assert not driver.contexts
    assert len(contexts.prepare([1 / 8, 1 / 2])) == 2
    contexts.close()
    assert not driver.contexts


def test_teardown_is_in_reverse_order_and_happens_once() -> None:
    driver = FakeDriver()
    contexts = GreenContexts(driver)
    contexts.open(16)
    before = len(driver.calls)
    contexts.close()
    assert driver.calls[before:] == 2 * ["cuStreamSynchronize", "cuStreamDestroy", "cuGreenCtxDestroy"]
    contexts.close()
    assert len(driver.calls) == before + 6


@pytest.mark.parametrize("nth", range(12))
def test_teardown_continues_after_a_failed_call_and_raises(nth: int) -> None:
    driver = FakeDriver()
    contexts = GreenContexts(driver)
    contexts.prepare([1 / 8, 1 / 2])
    driver.fail_at = len(driver.calls) + nth
    with pytest.raises(CudaError):
        contexts.close()
    assert not driver.contexts
    assert not driver.streams
    contexts.close()


def test_an_old_driver_is_reported() -> None:
    with pytest.raises(CudaUnavailableError, match=r"for CUDA 12\.4, and this one is for 12\.2: update"):
        GreenContexts(FakeDriver(version=12020))


def test_a_device_without_sm_resources_cannot_be_partitioned() -> None:
    driver = FakeDriver()
    driver.fail_at = 2
    with pytest.raises(CudaUnavailableError, match="GPU 0 can't be partitioned: cuDeviceGetDevResource failed"):
        GreenContexts(driver)


@pytest.mark.parametrize("sms", [6, 14])
def test_a_device_too_small_for_two_partitions_cannot_be_partitioned(sms: int) -> None:
    with pytest.raises(CudaUnavailableError, match=f"has {sms} SMs, too few for two partitions of 8"):
        GreenContexts(FakeDriver(sms=sms))


@pytest.mark.parametrize(("major", "minimum", "step"), [(7, 2, 2), (8, 4, 2), (9, 8, 8), (10, 8, 8)])
def test_the_guideline_applies_if_the_driver_reports_no_granularity(major: int, minimum: int, step: int) -> None:
    with GreenContexts(FakeDriver(80, 0, 0, major=major)) as contexts:
        assert contexts.units == Device(80, step=step, minimum=minimum)
