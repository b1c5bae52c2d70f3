"""The engine on a GPU: tokens equal transformers', with and without graphs and lanes; starting a step never waits."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cpd.common.blocks import blocks_for, extend_hashes, hash_root
from cpd.performance.colocation import Mode
from engine.batch import SampleRow
from engine.execution.runner import TorchRunner
from engine.model.config import load_config
from engine.types import Request, SamplingParams
from tests.checkpoints import oracle_generate, oracle_logits
from tests.conftest import MakeCheckpoint
from tests.engine.paging import Pager
from tests.engine.test_lanes_model import Arrival, serve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGES = 400
LONGEST = 1200
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "llama3": {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1},
}
TOLERANCE = 0.25
"""Largest gap between the best logit and a bfloat16 model's choice, in standard deviations of the logits. On a CPU,
which rounds as often, the largest of 1,400 tokens was 0.14."""

Load = Callable[..., TorchRunner]


@pytest.fixture(params=list(MODELS))
def directory(request: pytest.FixtureRequest, checkpoint: MakeCheckpoint) -> Path:
    return checkpoint(request.param, **MODELS[request.param])


@pytest.fixture(scope="module")
def load() -> Load:
    """Makes runners for 8 decodes, each once: `load(directory, dtype, graphs, lanes)`."""

    @cache
    def make(directory: Path, dtype: str, graphs: bool = True, lanes: bool = False) -> TorchRunner:
        return TorchRunner(
            directory,
            dtype=dtype,
            device="cuda",
            kv_bytes=PAGES * load_config(directory).page_bytes("float32"),
            max_model_len=LONGEST,
            max_num_seqs=8,
            graphs=graphs,
            lanes=lanes,
        )

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(480), k=length)


def assert_follows(directory: Path, prompt: Sequence[int], output: Sequence[int], tolerance: float = TOLERANCE) -> None:
    """Asserts that every token is nearly the best one for transformers in float32."""
    logits = oracle_logits(directory, [*prompt, *output])
    spread = float(logits.std())
    for position, token in enumerate(output, start=len(prompt) - 1):
        best = float(logits[position].max())
        assert best - float(logits[position, token]) <= tolerance * spread, position - len(prompt) + 1


def assert_chooses_as_transformers(runner: TorchRunner, directory: Path) -> None:
    pager = Pager(runner)
    for length, chunk in ((1, 1), (16, 1 << 30), (75, 7), (900, 333)):
        prompt = prompt_of(length, seed=length)
        oracle = oracle_generate(directory, prompt, 24)
        sequence = pager.start(prompt)
        tokens = pager.generate(sequence, 24, chunk)
        sure = next((i for i, margin in enumerate(oracle.margins) if margin < 1e-3), 24)
        assert tokens[:sure] == oracle.token_ids[:sure], (length, chunk)
        pager.release(sequence)


def test_float32_chooses_as_transformers(load: Load, directory: Path) -> None:
    assert_chooses_as_transformers(load(directory, "float32"), directory)


@pytest.mark.parametrize("family", ["mistral_window", "mixtral", "qwen2_window", "qwen3_moe"])
def test_experts_and_windows_choose_as_transformers(load: Load, checkpoint: MakeCheckpoint, family: str) -> None:
    assert_chooses_as_transformers(load(checkpoint(family), "float32"), checkpoint(family))


@pytest.mark.parametrize("graphs", [False, True])
def test_bfloat16_stays_within_tolerance(load: Load, directory: Path, graphs: bool) -> None:
    """Batches of 1 to 11 decodes, without graphs and with them: exact, padded, and larger than the largest graph."""
    runner = load(directory, "bfloat16", graphs)
    pager = Pager(runner, seed=1)
    prompts = [prompt_of(length, seed=length) for length in (3, 200, 17, 90, 64, 33, 700, 5, 1, 40, 120)]
    running = []
    for prompt in prompts:
        running.append(pager.start(prompt))
        pager.step([(sequence, sequence.remaining) for sequence in running])
    for left in range(len(running), 0, -1):
        for _ in range(2):
            pager.step([(sequence, 1) for sequence in running[:left]])
    for prompt, sequence in zip(prompts, running, strict=True):
        assert_follows(directory, prompt, sequence.output)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch warns when the mode is set
@pytest.mark.parametrize("graphs", [False, True])
def test_starting_a_step_waits_for_nothing(load: Load, directory: Path, graphs: bool) -> None:
    """In sync debug mode, torch raises on every call that waits for the device."""
    runner = load(directory, "bfloat16", graphs)
    pager = Pager(runner)
    sequences = [pager.start(prompt_of(length, seed=length)) for length in (30, 50, 70, 20)]
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.0, top_logprobs=3, min_tokens=5, stop_token_ids=frozenset([2])),
    ]
    for sequence in sequences:
        pager.step([(sequence, sequence.remaining)])
    for attempt in range(3):  # the first two compile kernels and allocate memory
        batch = pager.batch([(sequence, 1) for sequence in sequences])
        batch.samples = [
            SampleRow(row.row, kind, row.choice, row.position, row.tokens, row.prompt_len)
            for row, kind in zip(batch.samples, kinds, strict=True)
        ]
        torch.cuda.set_sync_debug_mode("error" if attempt == 2 else "default")
        try:
            runner.full.launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for sequence, sampled in zip(sequences, runner.full.collect().sampled, strict=True):
            sequence.tokens.append(sampled.token_id)


def test_a_copied_page_continues_alike(load: Load, directory: Path) -> None:
    runner = load(directory, "bfloat16")
    pager = Pager(runner)
    first = pager.start(prompt_of(40))
    pager.generate(first, 1)
    second = pager.start(first.tokens[:40])
    second.tokens, second.num_computed = list(first.tokens), first.num_computed
    spare = pager.start([0])
    pager.step([(spare, 1)])
    runner.copy_page(first.pages[-1], spare.pages[0])
    second.pages = [*first.pages[:-1], spare.pages[0]]
    for _ in range(8):
        pager.step([(first, 1), (second, 1)])
    assert first.output == second.output


def test_pages_come_back_from_pinned_memory(load: Load, directory: Path) -> None:
    """Eight prompts are served twice; the pool holds seven."""
    root, arrivals = hash_root(b"model"), []
    for number in range(16):
        tokens = prompt_of(900, seed=number % 8)
        params = SamplingParams(temperature=0.0, max_tokens=4)
        request = Request(f"r{number}", tokens, len(tokens), params, root, extend_hashes(root, tokens))
        arrivals.append(Arrival(request, 60 * number, -1, None))
    runner = load(directory, "float32")
    assert 7 * blocks_for(904) <= runner.num_pages < 8 * blocks_for(904)
    host = runner.host_memory(8 * blocks_for(904) * runner.page_bytes, checksums=True)
    outputs = serve(runner, "mixed", arrivals, LONGEST, host)
    cached = [outputs[arrival.request.id, 0][0].cached_tokens for arrival in arrivals]
    assert cached == [0] * 8 + [896] * 8
    for arrival in arrivals[8:]:
        tokens = [token for output in outputs[arrival.request.id, 0] for token in output.token_ids]
        assert_follows(directory, arrival.request.token_ids, tokens, 1e-3)


# Tests with Green Contexts come last: a driver that fails there does not affect the others.


def requests() -> list[Arrival]:
    """Returns greedy requests with long and short prompts that arrive while others decode."""
    root, arrivals = hash_root(b"model"), []
    for number, length in enumerate((9, 600, 70, 16, 1000, 33, 300)):
        tokens = prompt_of(length, seed=length)
        params = SamplingParams(temperature=0.0, seed=number, max_tokens=60 + number)
        request = Request(f"r{number}", tokens, length, params, root, extend_hashes(root, tokens))
        arrivals.append(Arrival(request, 4 * number, -1, None))
    return arrivals


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["mixed", "lanes", "auto"])
def test_lanes_follow_the_oracle(load: Load, directory: Path, dtype: str, mode: Mode) -> None:
    runner = load(directory, dtype, lanes=True)
    assert runner.splits, "this GPU has no lanes; the log says why"
    arrivals = requests()
    outputs = serve(runner, mode, arrivals, LONGEST)
    for arrival in arrivals:
        tokens = [token for output in outputs[arrival.request.id, 0] for token in output.token_ids]
        assert tokens
        tolerance = 1e-3 if dtype == "float32" else TOLERANCE
        assert_follows(directory, arrival.request.token_ids, tokens, tolerance)
