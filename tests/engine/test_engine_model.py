"""The engine with a real model agrees with transformers, with caching, chunks, shared prefixes and preemption."""

import random
from pathlib import Path

import pytest
import torch

from cpd.common.blocks import BLOCK_SIZE, extend_hashes, hash_root
from cpd.performance.colocation import Colocation
from engine.engine import Engine
from engine.execution.runner import TorchRunner
from engine.model.config import load_config
from engine.types import Request, SamplingParams
from tests.checkpoints import load_oracle
from tests.conftest import MakeCheckpoint
from tests.engine.fakes import MODEL, Served, assert_all_released, drain
from tests.gumbel import gumbel_noise

MARGIN = 1e-4
"""Tokens must agree where the oracle's two best choices, noise included, are further apart than this."""


def make_engine(directory: Path, num_pages: int, token_budget: int = 64) -> Engine:
    """A float32 runner on this machine's default back end."""
    kv_bytes = num_pages * load_config(directory).page_bytes("float32")
    runner = TorchRunner(directory, dtype="float32", device="cpu", kv_bytes=kv_bytes, max_model_len=300)
    return Engine(
        runner,
        max_model_len=300,
        colocation=Colocation(MODEL, token_budget=token_budget),
        max_num_seqs=16,
        max_queue_tokens=100_000,
        window=runner.config.longest_window or 0,
    )


def make_request(name: str, token_ids: list[int], params: SamplingParams, n: int = 1) -> Request:
    root = hash_root(b"model")
    return Request(name, token_ids, len(token_ids), params, root, extend_hashes(root, token_ids), n=n)


@torch.inference_mode()
def assert_chosen_as_by_transformers(directory: Path, served: Served, requests: list[Request]) -> None:
    """Asserts that every token is the oracle's best choice, or within MARGIN of it."""
    model = load_oracle(directory)
    for request in requests:
        for choice in range(request.n):
            output, start = served.token_ids[request.id, choice], len(request.token_ids)
            assert len(output) == request.params.max_tokens
            logits = model(input_ids=torch.tensor([[*request.token_ids, *output]])).logits[0]
            for i, token_id in enumerate(output):
                scores = logits[start + i - 1].float()
                if request.params.temperature:
                    noise = gumbel_noise(request.params.seed, choice, start + i, len(scores))
                    scores = scores / request.params.temperature + noise
                assert scores[token_id] >= scores.max() - MARGIN, (request.id, choice, i)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama3", "mistral_window", "mixtral", "qwen2_window", "qwen3", "qwen3_moe"])
def test_tokens_are_those_of_transformers(checkpoint: MakeCheckpoint, family: str, temperature: float) -> None:
    """16 requests at once in a small pool, with shared prefixes, choices, and a second round from the cache."""
    directory = checkpoint(family)
    engine = make_engine(directory, num_pages=24)
    numbers = random.Random(5)
    shared = numbers.choices(range(480), k=3 * BLOCK_SIZE)
    requests = []
    for i in range(16):
        tail = numbers.choices(range(480), k=numbers.choice([3, 16, 40, 150]))
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=numbers.choice([5, 30, 60]))
        token_ids = shared + tail if i % 2 else tail
        requests.append(make_request(f"r{i}", token_ids, params, n=3 if i % 5 == 0 else 1))
    for _ in range(2):
        for request in requests:
            engine.add(request)
        served = drain(engine)
        assert_chosen_as_by_transformers(directory, served, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().cached_tokens > 0
    assert_all_released(engine)


def test_seeded_tokens_are_the_same_alone_and_in_a_batch(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("llama2")
    numbers = random.Random(6)
    requests = [
        make_request(f"r{i}", numbers.choices(range(480), k=20 + 7 * i), SamplingParams(seed=i, max_tokens=30))
        for i in range(8)
    ]
    together = make_engine(directory, num_pages=200)
    for request in requests:
        together.add(request)
    served = drain(together)
    alone = make_engine(directory, num_pages=200, token_budget=32)
    for request in requests:
        alone.add(request)
        assert drain(alone).token_ids[request.id, 0] == served.token_ids[request.id, 0]
