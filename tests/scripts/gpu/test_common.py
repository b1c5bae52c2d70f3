import pytest
import torch

from scripts.gpu import common
from scripts.gpu.common import MissingError, Timing


def test_a_timing_is_the_median_and_the_middle() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median == 3.5
    assert 1.0 <= timing.low <= 2.0
    assert 5.0 <= timing.high <= 100.0
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)


def test_require_explains_a_module_that_does_not_load() -> None:
    with pytest.raises(MissingError, match="carry the wheel of nixl"):
        common.require("nixl_that_is_not_here", "nixl")


def test_the_commit_of_a_copy_without_history_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_COMMIT", "0123456789ab")
    assert common.commit() == "0123456789ab"


def test_the_error_is_relative_and_sees_nan() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert common.relative_error(reference.clone(), reference) == 0.0
    assert common.relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert common.relative_error(torch.tensor([3.0, float("nan")]), reference) != 0.0
