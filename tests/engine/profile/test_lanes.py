"""Measuring lanes: fake ones with known times, and real ones."""

from collections.abc import Callable, Sequence

import pytest
import torch

from cpd.performance.fit import Sample, fit_profile
from engine.batch import Batch, Sampled
from engine.execution.executor import Lane, Split, StepResult
from engine.execution.runner import TorchRunner
from engine.profile.lanes import measure_samples
from engine.profile.measure import Limits
from tests.conftest import MakeCheckpoint

DECODE_SLOWDOWN, PREFILL_SLOWDOWN = 1.25, 1.5


class FakeLane:
    """A step's time follows from share and tokens, and is longer while the other lane is busy.

    The prefill lane is done when it has been polled `patience` times.
    """

    overlaps = False

    def __init__(self, share: float, slowdown: float = 1.0, patience: int = 0) -> None:
        self.share = share
        self.other: FakeLane | None = None
        self.pages: set[int] = set()
        self._slowdown = slowdown
        self._patience = patience
        self._asked = 0
        self._ran: StepResult | None = None

    @property
    def busy(self) -> bool:
        return self._ran is not None

    def launch(self, batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        assert not self.busy
        self.pages = set(batch.block_tables.ravel().tolist())
        tokens, context = len(batch.token_ids), int(batch.context_lens.sum())
        ms = (2 + 0.05 * tokens + 1e-3 * context) / self.share
        if self.other and self.other.busy:
            assert not self.pages & self.other.pages
        if self.other and (self.other.busy or self._patience):
            ms *= self._slowdown
        self._asked = 0
        self._ran = StepResult([Sampled(0)] * len(batch.samples), 0.0, ms)

    def done(self) -> bool:
        self._asked += 1
        return self._asked > self._patience

    def collect(self) -> StepResult:
        ran, self._ran = self._ran, None
        assert ran is not None
        return ran


class FakeRunner:
    """A device of three units."""

    num_pages = 2000
    vocab_size = 500

    def __init__(self) -> None:
        self.full: Lane = FakeLane(1.0)
        self.lanes = [
            (FakeLane(1 - units / 3, PREFILL_SLOWDOWN, patience=3), FakeLane(units / 3, DECODE_SLOWDOWN))
            for units in (1, 2)
        ]
        self.splits: Sequence[Split] = [Split(prefill, decode) for prefill, decode in self.lanes]

    def copy_page(self, source: int, target: int) -> None: ...

    def settle(self) -> None: ...


def connect(runner: FakeRunner) -> None:
    for prefill, decode in runner.lanes:
        prefill.other, decode.other = decode, prefill


def test_each_share_is_measured_once_and_each_split_both_ways() -> None:
    runner = FakeRunner()
    fractions: list[float] = []
    samples = measure_samples(runner, Limits(64, 8192, 2000), 30, lambda what, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1)
    assert {sample.share for sample in samples} == {0.333333, 0.666667, 1.0}
    for share in (0.333333, 0.666667, 1.0):
        alone = [sample.work for sample in samples if sample.share == share and not sample.other_lane]
        assert len(alone) == len(set(alone)) > 30
    together = [sample for sample in samples if sample.other_lane]
    assert {(sample.share, sample.work.is_decode) for sample in together} == {
        (share, is_decode) for share in (0.333333, 0.666667) for is_decode in (True, False)
    }
    assert all(sample.other_lane and sample.other_lane.is_decode != sample.work.is_decode for sample in together)
    assert not any(lane.busy for pair in runner.lanes for lane in pair)


def test_the_slowdown_by_the_other_lane_is_measured() -> None:
    runner = FakeRunner()
    samples = [s for s in measure_samples(runner, Limits(64, 8192, 2000), 30, lambda *_: None) if not s.other_lane]
    connect(runner)
    samples += [s for s in measure_samples(runner, Limits(64, 8192, 2000), 30, lambda *_: None) if s.other_lane]
    profile = fit_profile(samples, device="d", model="m", units=3)
    for part in profile.shares[:-1]:
        assert part.decode.slowdown == pytest.approx(DECODE_SLOWDOWN, rel=0.02)
        assert part.prefill.slowdown == pytest.approx(PREFILL_SLOWDOWN, rel=0.02)
    assert profile.error is not None
    assert profile.error.p95 < 0.05


def test_real_lanes_are_measured(checkpoint: MakeCheckpoint) -> None:
    torch.set_num_threads(2)
    runner = TorchRunner(checkpoint("qwen3"), dtype="auto", device="cpu", kv_bytes=8 << 20, max_model_len=0)
    limits = Limits(16, runner.config.max_model_len, runner.num_pages)
    samples: list[Sample] = measure_samples(runner, limits, 1.0, lambda *_: None)
    profile = fit_profile(samples, device="d", model="m", units=2)
    assert [part.share for part in profile.shares] == [0.5, 1.0]
    assert profile.shares[0].decode.slowdown != 1.0
    assert profile.shares[0].prefill.slowdown != 1.0
