"""The shipped profiles are the script's output and agree roughly with the data sheets."""

import pytest

from cpd.performance.model import PerfModel, Profile, Work
from cpd.performance.profiles import PROFILES
from scripts.roofline_profiles import BANDWIDTH, MATMUL_FLOPS, SHAPES, SMS, file_of, profile

QWEN = SHAPES["Qwen3-8B"]


@pytest.mark.parametrize("model", SHAPES)
def test_the_files_are_up_to_date(model: str) -> None:
    path = PROFILES / file_of(model)
    assert Profile.load(path) == profile(model, SHAPES[model])


def test_the_shape_is_the_published_one() -> None:
    assert QWEN.layer_params / 1e9 == pytest.approx(6.95, abs=0.01)  # Qwen3-8B: 6.95 G without embeddings
    assert QWEN.kv_token_bytes == 147_456


def test_steps_are_as_long_as_the_roofline() -> None:
    model = PerfModel(profile("Qwen3-8B", QWEN))
    weights_ms = 2 * (QWEN.layer_params + QWEN.head_params) / BANDWIDTH * 1e3
    assert model.step_ms(Work.decode(1, 1)) == pytest.approx(weights_ms, rel=0.1)
    context = 128 * 8192
    context_ms = context * QWEN.kv_token_bytes / BANDWIDTH * 1e3
    assert model.step_ms(Work.decode(128, context)) == pytest.approx(weights_ms + context_ms, rel=0.05)
    linear_ms = 2 * QWEN.layer_params * 2048 / MATMUL_FLOPS * 1e3
    assert model.step_ms(Work.prefill(2048)) == pytest.approx(linear_ms, rel=0.1)


def test_decodes_need_few_units_and_prefills_all_of_them() -> None:
    model = PerfModel(profile("Qwen3-8B", QWEN))
    decode, prefill = Work.decode(8, 8000), Work.prefill(4096)
    assert model.step_ms(decode, 64 / SMS) == pytest.approx(model.step_ms(decode), rel=0.05)
    assert model.step_ms(prefill, 64 / SMS) == pytest.approx(model.step_ms(prefill) * SMS / 64, rel=0.05)


def test_two_kernels_side_by_side_gain_what_was_published() -> None:
    """A compute-bound and a memory-bound step of equal length: 1.34 times faster on disjoint SMs than one by one."""
    model = PerfModel(profile("Qwen3-8B", QWEN))
    prefill = Work.prefill(2048)
    alone_ms = model.step_ms(prefill)
    context = int((alone_ms - model.step_ms(Work.decode(1, 0))) / (QWEN.kv_token_bytes / BANDWIDTH * 1e3))
    decode = Work.decode(1, context)
    together_ms = min(
        max(model.step_ms(decode, sms / SMS, prefill), model.step_ms(prefill, 1 - sms / SMS, decode))
        for sms in range(8, SMS, 8)
    )
    assert 2 * alone_ms / together_ms == pytest.approx(1.34, rel=0.03)
