"""Profiles that are wrong on purpose: what workers and routers believe of a device that behaves otherwise."""

from random import Random

from cpd.performance.model import Profile, ShareProfile, StepCost


def mistaken(profile: Profile, error: float, rng: Random) -> Profile:
    """Returns a profile whose kinds of steps and transfers are each wrong by a factor of their own.

    Args:
        error: 0.2 draws each factor uniformly from 0.8 to 1.2.
    """

    def factor() -> float:
        return rng.uniform(1 - error, 1 + error)

    decode, prefill, attention, transfer = factor(), factor(), factor(), factor()

    moved = profile.transfer.model_copy(update={"bytes_per_ms": transfer * profile.transfer.bytes_per_ms})
    return _with_times(profile, decode, prefill, attention).model_copy(update={"transfer": moved})


def scaled(profile: Profile, factor: float) -> Profile:
    """Returns a profile whose steps all take `factor` times as long."""
    return _with_times(profile, factor, factor, factor)


def _with_times(profile: Profile, decode: float, prefill: float, attention: float) -> Profile:
    """Returns a profile whose decodes, prefills and attention take this many times as long."""
    shares = tuple(
        ShareProfile(
            share=part.share,
            decode=_scaled(part.decode, decode, attention),
            prefill=_scaled(part.prefill, prefill, attention),
        )
        for part in profile.shares
    )
    return profile.model_copy(update={"shares": shares})


def _scaled(cost: StepCost, curve: float, attention: float) -> StepCost:
    return cost.model_copy(
        update={
            "tokens_ms": tuple(curve * ms for ms in cost.tokens_ms),
            "seq_ms": curve * cost.seq_ms,
            "context_ms": attention * cost.context_ms,
            "pair_ms": attention * cost.pair_ms,
        }
    )
