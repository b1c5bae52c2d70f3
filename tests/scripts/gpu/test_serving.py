"""Conversations, bursts and the comparison with transformers, with a small model on a CPU."""

import shutil
from pathlib import Path

import pytest

from engine.execution.cpu.lanes import own_cores, use_threads
from engine.types import Finish, Output
from scripts.gpu import interference, serving, transformers_batching
from scripts.gpu.device_model import device_model
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Figure, Report
from scripts.gpu.serving import ConversationKind
from tests.scripts.gpu.test_engine_steps import SMALL
from tests.scripts.gpu.test_results import CEILINGS, ENVIRONMENT

SHORT = ConversationKind("short", 40, 20, 4, turns=2)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the profile of the small model, as the first experiment leaves it."""
    use_threads(own_cores())
    report = Report("first", "?", ENVIRONMENT, CEILINGS, tmp_path_factory.mktemp("profile"))
    runner = random_runner(SMALL, tokens=2048, graph_decodes=0, lanes=True, device="cpu")
    device_model(report, runner, "Qwen3-4B", most_seqs=4, seconds=2)
    assert report.out is not None
    return report.out


@pytest.fixture
def report(measured: Path, tmp_path: Path) -> Report:
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    return Report("serving", "?", ENVIRONMENT, CEILINGS, tmp_path)


@pytest.fixture(autouse=True)
def all_cores() -> None:
    """Uses all cores, as a worker does at start: lanes are shares of them."""
    use_threads(own_cores())


def figures(report: Report) -> dict[str, Figure]:
    return {figure.name: figure for figure in report.figures}


def test_conversations_are_compared_with_mixed_batches(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONVERSATION_KINDS", (SHORT,))
    monkeypatch.setattr(serving, "CONCURRENCIES", (3, 2))
    serving.measure_all(report, SMALL, device="cpu")
    found = figures(report)
    for concurrency, turns in ((3, 8), (2, 6)):
        name = f"Qwen3-4B: short x {concurrency}"
        for mode in ("mixed", "lanes", "auto"):
            assert found[f"{name}, {mode}: throughput"].note.startswith(f"{turns} turns")
        lanes, mixed = (found[f"{name}, {mode}: ITL p99"].value for mode in ("lanes", "mixed"))
        assert lanes is not None
        assert mixed is not None
        assert found[f"{name}: lanes / mixed: ITL p99"].value == pytest.approx(lanes / mixed)
        assert found[f"{name}: lanes / mixed: TTFT p50"].target == serving.MAX_TTFT
        assert found[f"{name}: auto / mixed: TTFT p50"].target is None


def test_every_turn_has_the_conversation_so_far_and_all_its_tokens() -> None:
    prompts: list[list[int]] = []

    class Engine:
        """Answers each prompt at once, with the number of prompts so far."""

        def __init__(self) -> None:
            self.left: dict[str, int] = {}

        def add(self, tokens: list[int], max_tokens: int) -> str:
            prompts.append(list(tokens))
            self.left[str(len(prompts))] = max_tokens
            return str(len(prompts))

        def step(self) -> list[Output]:
            outputs = []
            for name in list(self.left):
                self.left[name] -= 1
                finish = None if self.left[name] else Finish.LENGTH
                if finish:
                    del self.left[name]
                outputs.append(Output(name, 0, [1000 + len(prompts)], [], finish))
            return outputs

        def finish(self) -> None:
            assert not self.left

    served = serving.serve(Engine(), SHORT, conversations=3, concurrency=2, vocab_size=96)  # type: ignore[arg-type]
    assert len(served.ttft_ms) == 6
    assert len(served.gaps_ms) == 6 * 3
    assert [len(prompt) for prompt in prompts] == [40, 40, 64, 64, 40, 64]
    assert prompts[2][:40] == prompts[0]
    assert prompts[2][40:44] == [1002] * 4
    assert max(prompts[2][44:]) < 96


def test_bursts_are_compared_with_undisturbed_streams_and_the_lane_alone(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DECODES", 3), ("CONTEXT", 16), ("PROMPTS", (1, 2)), ("LENGTHS", (24, 100)), ("REPEATS", 1)):
        monkeypatch.setattr(interference, name, value)
    interference.measure_all(report, SMALL, device="cpu")
    found = figures(report)
    beside = "Qwen3-4B: 3 decodes beside bursts, "
    assert found[f"{beside}lanes: worst gap / undisturbed"].target == interference.MAX_OVER_FULL
    assert found[f"{beside}mixed: worst gap / undisturbed"].target is None
    if own_cores() > 1:
        split = next(name for name in report.series if name.startswith("decodes on"))
        assert found[f"{beside}{split}: worst gap / the decode lane alone"].target == interference.MAX_OVER_LANE
    assert next(iter(report.series)) == "mixed", "an interrupted run has the baseline"
    assert len(report.series["lanes"]) == 4
    assert all(burst["during_ms"] > 0 and burst["ttft_ms"] > 0 for burst in report.series["lanes"])


def test_the_device_is_measured_once(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.gpu.device_model.measure_samples", None)
    runner = random_runner(SMALL, tokens=64, graph_decodes=0, device="cpu")
    profile = device_model(report, runner, "Qwen3-4B", most_seqs=4).profile
    assert profile.source == "measured"
    assert profile.model == "Qwen3-4B, bfloat16"


def test_the_engine_is_compared_with_transformers(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROMPTS", 3), ("PROMPT", 20), ("OUTPUT", 6), ("WARM_UP", (1, 2))):
        monkeypatch.setattr(transformers_batching, name, value)
    limits = {"num_blocks": 8, "max_batch_tokens": 256}  # without either limit, it takes all memory
    transformers_batching.measure_all(report, SMALL, device="cpu", limits=limits)
    found = figures(report)
    own, theirs = (found[f"Qwen3-4B: 3 x 20 + 6, {name}"].value for name in ("engine", "transformers"))
    assert own is not None
    assert theirs is not None
    assert found["Qwen3-4B: 3 x 20 + 6, transformers"].note.endswith("sdpa")
    ratio = found["Qwen3-4B: engine / transformers, throughput"]
    assert ratio.value == pytest.approx(own / theirs)
    assert ratio.target == transformers_batching.MIN_GAIN
