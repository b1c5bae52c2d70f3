"""Fitting the performance model to devices that follow other formulas."""

import random
from collections.abc import Callable
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd.performance.fit import Sample, fit_profile, prediction_errors
from cpd.performance.model import PerfModel, Profile, TransferProfile, Work

Lens = list[tuple[int, int]]
"""Computed tokens and cached tokens of each sequence."""
Device = Callable[[Lens, float], float]
"""Duration of a step on a share of the device, ms."""


def work_of(lens: Lens) -> Work:
    work = Work()
    for tokens, before in lens:
        work += Work.decode(1, before + 1) if tokens == 1 else Work.prefill(tokens, before)
    return work


def gpu(lens: Lens, share: float) -> float:
    """An 8 B model on an H200: whole tiles of matrix multiplications, kernels bound by either memory or arithmetic.

    Decodes are replayed graphs. Other steps are launched kernel by kernel, which takes the host 20 ms.
    """
    flops_per_ms, bytes_per_ms = 790e9 * share, 4.3e9 * min(1.0, share / 0.45)
    tokens = sum(count for count, _ in lens)
    ms = 0.4 + 0.01 * len(lens)
    for weights in (8192 * 4096, 4096 * 4096, 2 * 12288 * 4096, 12288 * 4096):
        tiles = 64 * ceil(tokens / 64)
        ms += 36 * max(0.003, 2 * weights / bytes_per_ms, 2 * weights * tiles / flops_per_ms)
    decoded = sum(before + 1 for count, before in lens if count == 1)
    ms += 36 * max(0.004, decoded * 4096 / (0.8 * bytes_per_ms))
    for count, before in lens:
        if count > 1:
            pairs = 64 * ceil(count / 64) * (before + count / 2)
            ms += 36 * max(0.004, 4 * 4096 * pairs / (0.5 * flops_per_ms))
    return ms if tokens == len(lens) else max(ms, 20.0)


def cpu(lens: Lens, share: float) -> float:
    """A 0.5 B model on a few cores, which alternates between reading weights and computing six rows with them."""
    tokens = sum(count for count, _ in lens)
    rows = 6 * ceil(tokens / 6)
    slow: float = share**-0.7
    ms = 0.05 + 15 * slow + 1.1 * rows / share + 0.03 * len(lens)
    for count, before in lens:
        ms += (before + count) * 0.002 * slow
        ms += count * (before + count / 2) * 0.00013 / share * (1 if count > 1 else 2)
    return ms


def grid() -> list[Lens]:
    """Returns the steps that a profile measures."""
    decodes = [[(1, context)] * batch for batch in (1, 2, 4, 8, 16, 32, 64, 128) for context in (16, 256, 1024, 4096)]
    prefills = [[(2**k, before)] for k in range(1, 14) for before in (0, 1024, 4096)]
    mixed = [
        [*[(1, context)] * batch, (chunk, 0)]
        for batch, context in ((4, 256), (4, 2048), (16, 512), (64, 256), (64, 2048))
        for chunk in (32, 128, 512, 2048)
    ]
    return decodes + prefills + mixed


def random_steps(rng: random.Random, count: int) -> list[Lens]:
    """Returns steps with uneven contexts, odd chunks and mixed batches."""
    steps: list[Lens] = []
    for index in range(count):
        kind = ("decode", "prefill", "mixed")[index % 3]
        lens: Lens = []
        if kind != "prefill":
            context = 2 ** rng.uniform(4, 13)
            lens += [(1, int(context * rng.uniform(0.2, 1.8))) for _ in range(int(2 ** rng.uniform(0, 7)))]
        if kind != "decode":
            for _ in range(rng.choice((1, 1, 2))):
                lens.append((int(2 ** rng.uniform(3, 12)), rng.choice((0, int(2 ** rng.uniform(4, 13))))))
        steps.append(lens)
    return steps


def measure(device: Device, steps: list[Lens], rng: random.Random, share: float = 1.0) -> list[Sample]:
    """Adds the noise of a real measurement: 3 %, and rare disturbances."""
    return [
        Sample(work_of(lens), device(lens, share) * rng.gauss(1, 0.03) * (3 if rng.random() < 0.03 else 1), share)
        for lens in steps
    ]


def quantiles(errors: list[float]) -> tuple[float, float]:
    median, p95 = np.quantile(errors, (0.5, 0.95)).tolist()
    return median, p95


@pytest.mark.parametrize("device", [gpu, cpu])
def test_steps_that_were_not_measured_are_predicted(device: Device) -> None:
    rng = random.Random(0)
    profile = fit_profile(measure(device, grid(), rng), device="d", model="m")
    exact = [Sample(work_of(lens), device(lens, 1.0)) for lens in random_steps(rng, 300)]
    median, p95 = quantiles(prediction_errors(PerfModel(profile), exact))
    assert median < 0.10
    assert p95 < 0.25
    assert profile.error is not None
    assert profile.error.samples == len(grid())
    assert profile.error.median < 0.10


@pytest.mark.parametrize("device", [gpu, cpu])
def test_shares_that_were_not_measured_are_predicted(device: Device) -> None:
    rng = random.Random(1)
    samples = [s for share in (0.125, 0.25, 0.5, 0.75, 1.0) for s in measure(device, grid(), rng, share)]
    model = PerfModel(fit_profile(samples, device="d", model="m"))
    exact = [
        Sample(work_of(lens), device(lens, share), share)
        for lens in random_steps(rng, 100)
        for share in (0.18, 0.35, 0.6, 0.9)
    ]
    median, p95 = quantiles(prediction_errors(model, exact))
    assert median < 0.10
    assert p95 < 0.25


def test_a_busy_other_lane_slows_down_by_the_measured_factor() -> None:
    rng = random.Random(2)
    samples = []
    for share in (0.5, 1.0):
        samples += measure(cpu, grid(), rng, share)
    decode, prefill = Work.decode(8, 8000), Work.prefill(512)
    for lens in grid()[::3]:
        work = work_of(lens)
        factor, other_lane = (1.3, prefill) if work.is_decode else (1.1, decode)
        samples.append(Sample(work, cpu(lens, 0.5) * factor, 0.5, other_lane))
    profile = fit_profile(samples, device="d", model="m")
    half, whole = profile.shares
    assert half.decode.slowdown == pytest.approx(1.3, rel=0.05)
    assert half.prefill.slowdown == pytest.approx(1.1, rel=0.05)
    assert (whole.decode.slowdown, whole.prefill.slowdown) == (1, 1)


def test_a_model_of_the_same_form_is_found_again() -> None:
    def device(lens: Lens, share: float) -> float:
        work = work_of(lens)
        ms = 3 + max(0.0, work.tokens - 64) * 0.5 + 1e-5 * work.context
        return ms if work.is_decode else ms + 0.01 * work.seqs + 1e-6 * work.pairs

    samples = [Sample(work_of(lens), device(lens, 1.0)) for lens in grid()]
    profile = fit_profile(samples, device="d", model="m", transfer=TransferProfile(fixed_ms=7))
    (part,) = profile.shares
    assert part.decode.context_ms == pytest.approx(1e-5, rel=1e-3)
    prefill = part.prefill
    assert (prefill.seq_ms, prefill.context_ms, prefill.pair_ms) == pytest.approx((0.01, 1e-5, 1e-6), rel=0.01)
    assert dict(zip(prefill.tokens, prefill.tokens_ms, strict=True))[1024] == pytest.approx(3 + 960 * 0.5, rel=1e-3)
    assert profile.transfer.fixed_ms == 7
    assert profile.error is not None
    assert profile.error.p95 < 0.01


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(0, 10_000), st.floats(0.01, 1e4), st.booleans()),
        min_size=10,
        max_size=40,
    )
)
def test_any_measurements_make_a_valid_profile(measured: list[tuple[int, int, float, bool]]) -> None:
    samples = [
        Sample(work, ms, share, Work.prefill(5) if is_shared else None)
        for tokens, before, ms, is_shared in measured
        for work in (Work.prefill(tokens + 1, before), Work.decode(tokens, tokens * (before + 1)))
        for share in (0.5, 1.0)
    ]
    samples += [Sample(work, 1.0, share) for work in (Work.decode(1, 9), Work.prefill(9)) for share in (0.5, 1.0)] * 2
    profile = fit_profile(samples, device="d", model="m")
    assert Profile.model_validate_json(profile.model_dump_json(by_alias=True)) == profile
    for sample in samples:
        assert PerfModel(profile).step_ms(sample.work, 0.7, sample.other_lane) >= 0


def test_too_few_samples_are_refused() -> None:
    decode, prefill = Work.decode(1, 10), Work.prefill(10)
    with pytest.raises(ValueError, match="too few prefill steps"):
        fit_profile([Sample(decode, 1.0)] * 5, device="d", model="m")
    with pytest.raises(ValueError, match=r"too few decode steps .* share 0.5"):
        fit_profile([Sample(prefill, 1.0, 0.5), Sample(decode, 1.0, 0.5, prefill)] * 5, device="d", model="m")
    with pytest.raises(ValueError, match="the last one must be 1"):
        fit_profile([Sample(work, 1.0, 0.5) for work in (decode, prefill)] * 5, device="d", model="m")
