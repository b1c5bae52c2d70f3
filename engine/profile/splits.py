"""Predicts how the two lanes share a profiled device."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpd.common.errors import ConfigError
from cpd.performance.model import PerfModel, Profile, Work
from cpd.performance.split import Device, LaneLoad, SplitShares, lane_split, lane_splits, prepared_splits

DECODES = (1, 4, 16, 64, 128)
CONTEXTS = (256, 1024, 4096)
"""Decodes and context lengths for which splits are prepared."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """Prediction for one split.

    Attributes:
        split: Units of each lane.
        prefill_ms: Time of the prompt while the other lane decodes.
        decode_ms: Time of a decode step while the other lane prefills.
        keeps_target: True if the decode step is within its target.
        prepared: True if workers prepare this split.
    """

    split: SplitShares
    prefill_ms: float
    decode_ms: float
    keeps_target: bool
    prepared: bool


@dataclass(frozen=True, slots=True)
class SplitTable:
    """Predictions of all splits for one load.

    Attributes:
        rows: Splits from the smallest decode lane to the largest.
        choice: Best split for this load.
        target_ms: Target for a decode step.
        alone_ms: Times of prompt and decode step, each alone on the whole device.
    """

    rows: list[SplitRow]
    choice: SplitShares
    target_ms: float
    alone_ms: tuple[float, float]


def split_table(
    profile: Profile, *, prompt: int, decodes: int, context: int, itl_ms: float, prepared: int
) -> SplitTable:
    """Predicts every split.

    Args:
        prompt: Tokens to prefill.
        decodes, context: Decoding sequences, and tokens of each.
        itl_ms: Target for a decode step; 0 is twice its time on the whole device.
        prepared: Number of splits that workers prepare.

    Raises:
        ConfigError: The device cannot be split.
    """
    model = PerfModel(profile)
    device = Device(profile.units, profile.unit_step, profile.unit_step)
    splits = lane_splits(device)
    if not splits:
        raise ConfigError(f"a device of {profile.units} units cannot be split; lanes need at least two parts")
    prefill = Work.prefill(prompt)
    load = _load(model, device, prefill, Work.decode(decodes, decodes * context), itl_ms)
    loads = [_load(model, device, prefill, Work.decode(n, n * each), itl_ms) for n in DECODES for each in CONTEXTS]
    few = prepared_splits(loads, splits, prepared)
    return SplitTable(
        rows=[_row(load, split, few) for split in splits],
        choice=lane_split(load, splits),
        target_ms=load.target_ms,
        alone_ms=(model.step_ms(prefill), model.step_ms(Work.decode(decodes, decodes * context))),
    )


def _load(model: PerfModel, device: Device, prefill: Work, decode: Work, itl_ms: float) -> LaneLoad:
    return LaneLoad.predicted(model, device, prefill, decode, itl_ms or 2 * model.step_ms(decode))


def _row(load: LaneLoad, split: SplitShares, prepared: Sequence[SplitShares]) -> SplitRow:
    prefill_ms, decode_ms = load.prefill_ms(split.prefill), load.decode_ms(split.decode)
    return SplitRow(split, prefill_ms, decode_ms, decode_ms <= load.target_ms, split in prepared)
