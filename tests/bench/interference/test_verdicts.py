import random
from collections.abc import Callable

import pytest

from bench.interference.result import Cell, Verdict
from bench.interference.verdicts import shape, verdicts
from tests.bench.interference.cells import burst, grid


def find(found: list[Verdict], part: str) -> Verdict:
    return next(verdict for verdict in found if part in verdict.text)


def test_lanes_that_decode_does_not_notice() -> None:
    cells = grid(lambda tokens: 4.0)
    found = shape(cells)
    assert (found.kind, found.below, found.above) == ("none", 65_536, None)
    assert verdicts(cells, found)[0].tone == "good"


def test_whole_prompts_in_one_step_are_linear() -> None:
    found = shape(grid(lambda tokens: tokens * 0.05))
    assert found.kind == "linear"
    assert found.percent_per_1000_tokens == pytest.approx(50, rel=0.05)
    assert (found.below, found.above) == (128, 256)


def test_chunked_prompts_are_a_plateau() -> None:
    found = shape(grid(lambda tokens: min(tokens, 2048) * 0.1))
    assert found.kind == "plateau"
    assert found.percent_per_1000_tokens == pytest.approx(100, rel=0.1)
    assert found.level_percent == pytest.approx(205, rel=0.1)


def test_a_budget_that_hides_small_prompts_is_a_step() -> None:
    found = shape(grid(lambda tokens: 6.0 if tokens <= 2048 else 330.0))
    assert (found.kind, found.jump, found.below, found.above) == ("step", (2048, 4096), 2048, 4096)
    assert found.level_percent == pytest.approx(330, rel=0.01)


@pytest.mark.parametrize("kind", ["linear", "plateau", "step"])
def test_noise_of_a_tenth_does_not_hide_the_shape(kind: str) -> None:
    rng = random.Random(kind)
    curves: dict[str, Callable[[int], float]] = {
        "linear": lambda tokens: tokens * 0.05,
        "plateau": lambda tokens: min(tokens, 2048) * 0.1,
        "step": lambda tokens: 6.0 if tokens <= 2048 else 330.0,
    }
    cells = grid(lambda tokens: (1 + curves[kind](tokens) / 100) * rng.uniform(0.9, 1.1) * 100 - 100)
    assert shape(cells).kind == kind


def test_increases_without_order_are_unclear() -> None:
    rng = random.Random(1)
    cells = grid(lambda tokens: rng.choice([0.0, 2000.0]))
    found = shape(cells)
    assert found.kind == "unclear"
    assert "unclear" in verdicts(cells, found)[0].text


def test_few_sizes_show_no_shape_but_a_threshold() -> None:
    found = shape(grid(lambda tokens: tokens * 0.05)[:2])
    assert (found.kind, found.below, found.above) == ("unclear", 128, 256)


def test_a_smallest_burst_that_hurts_leaves_no_threshold() -> None:
    cells = grid(lambda tokens: 300.0)
    found = shape(cells)
    assert (found.below, found.above) == (0, 128)
    assert "Even the smallest burst, 128 tokens" in verdicts(cells, found)[0].text


def test_the_worst_kind_of_a_size_decides_the_threshold() -> None:
    cells = [
        Cell(prefills=1, prefill_len=1024, bursts=[burst(2)]),
        Cell(prefills=4, prefill_len=256, bursts=[burst(30)]),
        Cell(prefills=1, prefill_len=256, bursts=[burst(1)]),
    ]
    assert (shape(cells).below, shape(cells).above) == (256, 1024)


def test_a_burst_without_recovery_names_its_kind() -> None:
    cells = grid(lambda tokens: 4.0)
    cells[3].bursts.append(burst(4, recovery_s=None))
    verdict = find(verdicts(cells, shape(cells)), "isn't back")
    assert verdict.tone == "bad"
    assert "8 x 128" in verdict.text


def test_recovery_is_given_on_average_and_at_most() -> None:
    cells = [Cell(prefills=1, prefill_len=1, bursts=[burst(1, recovery_s=0.1), burst(1, recovery_s=0.5)])]
    assert "0.30 s on average, 0.50 s at most" in find(verdicts(cells, shape(cells)), "recovers").text


def test_the_effect_on_prefill_is_a_ratio_of_times_to_first_token() -> None:
    cells = grid(lambda tokens: 4.0)
    assert "1.80 times" in find(verdicts(cells, shape(cells)), "first token").text


def test_doubts_are_reported() -> None:
    odd = burst(4, steady=False, drained=False, restarts=1, failed={"http_429": 2}, client_late_ms=9.0)
    cells = [Cell(prefills=1, prefill_len=1, bursts=[odd, burst(4)])]
    doubts = [verdict.text for verdict in verdicts(cells, shape(cells)) if verdict.text.startswith("In 1 of 2 bursts")]
    assert len(doubts) == 5


def test_an_unsteady_baseline_is_reported() -> None:
    cells = grid(lambda tokens: 4.0)
    assert not any("Without a burst" in verdict.text for verdict in verdicts(cells, shape(cells)))
    for cell in cells[::2]:
        cell.bursts[0].before.mean_ms *= 1.5
    assert "varied from 10.00 to 15.00 ms" in find(verdicts(cells, shape(cells)), "Without a burst").text


def test_without_bursts_nothing_is_claimed() -> None:
    cells = [Cell(prefills=1, prefill_len=1, error="refused")]
    assert [verdict.text for verdict in verdicts(cells, shape(cells))] == ["Nothing was measured."]
