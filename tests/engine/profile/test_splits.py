"""The table of `cpd profile split`."""

import pytest

from cpd.common.errors import ConfigError
from cpd.performance.model import Profile, ShareProfile, StepCost
from cpd.performance.split import SplitShares
from engine.profile.splits import SplitTable, split_table


def profile(units: int, unit_step: int) -> Profile:
    """Decodes scale up to half of the device, prefills up to all of it."""

    def part(share: float) -> ShareProfile:
        decode = StepCost(tokens=(1,), tokens_ms=(10 * max(1.0, 0.5 / share),), context_ms=1e-5)
        return ShareProfile(share=share, decode=decode, prefill=StepCost(tokens=(1, 1001), tokens_ms=(0, 100 / share)))

    shares = tuple(part(share) for share in (0.125, 0.25, 0.5, 0.75, 1.0))
    return Profile(source="roofline", device="d", model="m", units=units, unit_step=unit_step, shares=shares)


def table(units: int, unit_step: int, itl_ms: float = 0.0) -> SplitTable:
    return split_table(profile(units, unit_step), prompt=2048, decodes=32, context=1024, itl_ms=itl_ms, prepared=3)


def test_the_table_has_every_split_and_the_best_one() -> None:
    found = table(132, 8, itl_ms=12)
    assert sum(row.prepared for row in found.rows) == 3
    assert found.target_ms == 12
    decode_ms = [row.decode_ms for row in found.rows]
    assert decode_ms == sorted(decode_ms, reverse=True)
    assert [row.keeps_target for row in found.rows] == [ms <= 12 for ms in decode_ms]
    best = min((row for row in found.rows if row.keeps_target), key=lambda row: row.prefill_ms)
    assert found.choice == best.split


def test_without_a_target_decode_may_take_twice_as_long() -> None:
    found = table(132, 8)
    prefill_ms, decode_ms = found.alone_ms
    assert found.target_ms == pytest.approx(2 * decode_ms)
    assert all(row.prefill_ms >= prefill_ms for row in found.rows)


def test_two_cores_leave_no_choice() -> None:
    found = table(2, 1)
    assert [row.split for row in found.rows] == [found.choice] == [SplitShares(1, 1)]
    assert found.rows[0].prepared


def test_a_single_core_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="cannot be split"):
        table(1, 1)
