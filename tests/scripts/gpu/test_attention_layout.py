import math
from collections.abc import Callable, Iterator

import pytest
import torch

from scripts.gpu import attention_layout
from scripts.gpu.attention_layout import Case
from scripts.gpu.common import Timing
from scripts.gpu.models import MODELS
from scripts.gpu.results import Report
from tests.scripts.gpu import fake_cuda
from tests.scripts.gpu.test_results import CEILINGS, ENVIRONMENT

SMALL = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def run_once(run: Callable[[int], object], *, sets: int, **_: object) -> Timing:
    for index in range(sets):
        run(index)
    return Timing(1.0, 0.9, 1.1)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    monkeypatch.setattr(attention_layout, "measure_ms", run_once)
    monkeypatch.setattr(attention_layout, "require", lambda *_: fake_cuda)
    monkeypatch.setattr(attention_layout, "MODELS", {name: {**fields, **SMALL} for name, fields in MODELS.items()})
    monkeypatch.setattr(attention_layout, "RAGGED", [Case(c.name, c.lens[:5]) for c in attention_layout.RAGGED])
    monkeypatch.setattr(attention_layout, "TIMED", [Case("decode", [(1, 20)] * 3), Case("prefill", [(20, 40)])])
    monkeypatch.setattr(attention_layout, "POOL_PAGES", 200)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with fake_cuda.CudaIsCpu():
        yield Report("attention_layout", "?", ENVIRONMENT, CEILINGS)


def test_every_layout_is_checked_against_the_reference_and_timed(report: Report) -> None:
    attention_layout.run(report)
    values = {figure.name: figure for figure in report.figures}
    assert values["Qwen3-8B: strided: worst error"].met
    assert values["Llama-3-8B: NHD: worst error"].met
    assert values["Qwen3-8B: strided equals HND in every step"].value == 1.0
    assert values["Qwen3-8B: decode: strided / NHD"].value == 1.0
    floor = values["Qwen3-8B: decode, strided"].floor
    assert floor == pytest.approx(CEILINGS.bytes_ms(3 * 20 * 2 * 2 * 8 * 2))  # tokens, K and V, Hkv, D, bytes
    assert all(figure.met is not False for figure in report.figures)


def test_an_output_that_is_not_written_is_seen(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda._Wrapper, "run", lambda *_, **__: None)
    attention_layout.run(report)
    worst = next(figure for figure in report.figures if figure.name.endswith("worst error"))
    assert worst.value is not None
    assert math.isnan(worst.value)
    assert worst.met is False


def test_a_case_is_a_decode_if_every_sequence_computes_one_token() -> None:
    assert Case("", [(1, 5), (1, 1)]).decode
    assert not Case("", [(1, 5), (2, 2)]).decode
