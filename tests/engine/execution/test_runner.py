"""The whole model against transformers: the same greedy tokens in float32, however tokens are divided into steps."""

import ctypes
import json
import mmap
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import ConfigError
from engine.execution import runner as runner_module
from engine.execution.runner import TorchRunner
from engine.ops.torch_ops import TorchOps
from tests import checkpoints
from tests.checkpoints import oracle_generate, oracle_logits
from tests.conftest import MakeCheckpoint
from tests.engine.paging import Pager

FAMILIES = sorted(checkpoints.FAMILIES)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
SLIDING = ["sliding_attention"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, {"max_shard_size": "100KB", "seed": 3}) for family in ("llama2", "qwen2", "mixtral", "qwen3_moe")),
    ("llama2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama2", {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1}),
    ("llama3", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 97}),
    ("mistral", {"head_dim": 40, "num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 84}),
    ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": False}),
    ("qwen3", {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 1, "num_hidden_layers": 1}),
    ("qwen3", {"hidden_size": 72, "num_attention_heads": 4, "head_dim": 22, "vocab_size": 1001}),
    ("mistral_window", {"sliding_window": 2, "num_hidden_layers": 1}),
    ("qwen2_window", {"sliding_window": 33, "layer_types": [*SLIDING, "full_attention", *SLIDING]}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": [*SLIDING, *SLIDING, "full_attention"]},
    ),
    ("mixtral", {"sliding_window": 50, "num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size": 52}),
    ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 16, "rope_parameters": YARN}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 24, "decoder_sparse_step": 2, "num_experts": 40}),
    ("llama2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
]

BackEnd = Callable[[str], None]
Load = Callable[..., TorchRunner]


@pytest.fixture(params=["default", "torch"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a checkpoint with this machine's default back end, and with the fallback."""
    if request.param == "torch":
        monkeypatch.setattr(runner_module, "make_ops", lambda *_: TorchOps())

    def make(directory: Path, *, dtype: str = "auto", kv_bytes: int = 32 << 20, max_model_len: int = 0) -> TorchRunner:
        return TorchRunner(directory, dtype=dtype, device="cpu", kv_bytes=kv_bytes, max_model_len=max_model_len)

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(480), k=length)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: MakeCheckpoint, load: Load, family: str, overrides: dict[str, Any]
) -> None:
    directory = checkpoint(family, **overrides)
    pager = Pager(load(directory))
    for length, chunk in ((1, 1), (16, 1 << 30), (75, 1 << 30), (75, 7), (75, 32)):
        prompt = prompt_of(length, seed=length)
        oracle = oracle_generate(directory, prompt, 24)
        sequence = pager.start(prompt)
        assert pager.generate(sequence, 24, chunk) == oracle.token_ids, (length, chunk, min(oracle.margins))
        assert len(set(oracle.token_ids)) > 2  # the output is not empty
        pager.release(sequence)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_in_odd_chunks(checkpoint: MakeCheckpoint, load: Load, family: str) -> None:
    directory = checkpoint(family)
    pager = Pager(load(directory))
    prompt = prompt_of(1500)
    oracle = oracle_generate(directory, prompt, 16)
    for chunk in (1 << 30, 333):
        sequence = pager.start(prompt)
        assert pager.generate(sequence, 16, chunk) == oracle.token_ids, (chunk, min(oracle.margins))
        pager.release(sequence)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_prefills_and_decodes_share_steps(checkpoint: MakeCheckpoint, load: Load, family: str) -> None:
    directory = checkpoint(family)
    pager = Pager(load(directory), seed=1)
    prompts = [prompt_of(length, seed=length) for length in (3, 200, 17, 90, 64, 33, 150, 5, 1, 40, 120, 31)]
    oracles = [oracle_generate(directory, prompt, 20).token_ids for prompt in prompts]
    waiting = [pager.start(prompt) for prompt in prompts]
    running = [waiting.pop(0)]
    everyone = [*running, *waiting]
    choose = random.Random(2)
    while any(len(sequence.output) < 20 for sequence in everyone):
        if waiting and choose.random() < 0.7:
            running.append(waiting.pop(0))
        parts = [(s, min(s.remaining, choose.choice([1, 5, 16, 61]))) for s in running if len(s.output) < 20]
        choose.shuffle(parts)
        if parts:
            pager.step(parts, padding=choose.randrange(3))
        elif waiting:
            running.append(waiting.pop(0))
    assert [sequence.output for sequence in everyone] == oracles


def test_a_cached_prefix_may_end_within_a_block(checkpoint: MakeCheckpoint, load: Load) -> None:
    directory = checkpoint("llama2")
    pager = Pager(load(directory))
    prompt = prompt_of(48)
    first = pager.start(prompt)
    pager.generate(first, 1)
    second = pager.start(prompt)  # reuses the first two pages, and recomputes the last token of the third
    second.pages = first.pages[:3]
    second.num_computed = 47
    assert pager.generate(second, 10) == oracle_generate(directory, prompt, 10).token_ids


def test_a_copied_page_continues_alike(checkpoint: MakeCheckpoint, load: Load) -> None:
    directory = checkpoint("qwen2")
    runner = load(directory)
    pager = Pager(runner)
    prompt = prompt_of(40)
    first = pager.start(prompt)
    pager.generate(first, 1)
    second = pager.start(prompt)
    second.tokens, second.num_computed = list(first.tokens), first.num_computed
    pager.step([(pager.start(prompt_of(5)), 5)])
    spare = pager.start([0])
    pager.step([(spare, 1)])
    runner.copy_page(first.pages[-1], spare.pages[0])
    second.pages = [*first.pages[:-1], spare.pages[0]]
    expected = oracle_generate(directory, prompt, 8).token_ids
    while len(first.output) < 8:
        pager.step([(first, 1), (second, 1)])
    assert first.output == second.output == expected


def test_choices_of_one_prompt_share_its_row(checkpoint: MakeCheckpoint, load: Load) -> None:
    directory = checkpoint("llama2")
    runner = load(directory)
    pager = Pager(runner)
    prompts = [prompt_of(20, seed) for seed in range(3)]
    batch = pager.batch([(pager.start(prompt), 20) for prompt in prompts])
    a, b, c = batch.samples
    batch.samples = [b, a, a, c, b]
    runner.full.launch(batch)
    tokens = [sampled.token_id for sampled in runner.full.collect().sampled]
    oracle = [oracle_generate(directory, prompt, 1).token_ids[0] for prompt in prompts]
    assert tokens == [oracle[1], oracle[0], oracle[0], oracle[2], oracle[1]]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.endswith("_window")])
def test_every_type_chooses_within_tolerance_of_a_teacher_forced_oracle(
    checkpoint: MakeCheckpoint, load: Load, family: str, dtype: str, tolerance: float
) -> None:
    """`tolerance`: largest gap to float32's best logit, in standard deviations of the logits.

    Where two experts are about equally probable, rounding chooses the other one, and the token's logits are others; so
    it is in transformers' bfloat16, with gaps of up to 1. It happens to few tokens, an error would show in most.
    """
    directory = checkpoint(family, dtype=dtype)
    runner = load(directory)
    assert runner.dtype == dtype
    assert runner.pool.dtype == getattr(torch, dtype)
    tokens = prompt_of(90)
    logits = oracle_logits(directory, tokens)
    spread = float(logits.std())
    pager = Pager(runner)
    sequence = pager.start(tokens[:50])
    sampled = [pager.step([(sequence, 50)])[0].token_id]
    for token in tokens[50:]:
        sequence.tokens[-1] = token
        sampled.append(pager.step([(sequence, 1)])[0].token_id)
    gaps = [float(row.max() - row[token_id]) / spread for row, token_id in zip(logits[49:], sampled, strict=True)]
    may_differ = len(gaps) // 10 if runner.config.experts is not None and dtype != "float32" else 0
    assert sum(gap > tolerance for gap in gaps) <= may_differ, sorted(gaps)


def test_a_head_in_the_file_wins_over_tie_word_embeddings(
    checkpoint: MakeCheckpoint, load: Load, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoint("llama2"), tmp_path / "model"))
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    pager = Pager(load(directory))
    prompt = prompt_of(20)
    assert pager.generate(pager.start(prompt), 8) == oracle_generate(directory, prompt, 8).token_ids


def test_a_step_without_samples_computes_keys_and_values(checkpoint: MakeCheckpoint, load: Load) -> None:
    runner = load(checkpoint("llama2"))
    pager = Pager(runner)
    sequence = pager.start(prompt_of(40))
    assert pager.step([(sequence, 39)]) == []
    assert all(runner.pool[page].abs().sum(dim=(-1, -2)).min() > 0 for page in sequence.pages)


def test_dtype_and_length_follow_the_checkpoint_or_the_setting(checkpoint: MakeCheckpoint, load: Load) -> None:
    directory = checkpoint("llama2", dtype="bfloat16")
    runner = load(directory)
    assert (runner.dtype, runner.config.max_model_len) == ("bfloat16", 2048)
    assert runner.page_bytes == runner.pool[0].numel() * 2
    assert runner.num_pages == len(runner.pool) == (32 << 20) // runner.page_bytes
    runner = load(directory, dtype="float32", max_model_len=100)
    assert (runner.dtype, runner.config.max_model_len) == ("float32", 100)
    with pytest.raises(ConfigError, match=r"--max-model-len 2049 is over the checkpoint's limit of 2048"):
        load(directory, max_model_len=2049)
    with pytest.raises(ConfigError, match="dtype int4"):
        load(directory, dtype="int4")


def test_a_small_pool_cuts_the_context_and_a_tiny_one_is_refused(
    checkpoint: MakeCheckpoint, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint("llama2")
    page_bytes = load(directory).page_bytes
    runner = load(directory, kv_bytes=10 * page_bytes + 1)
    assert (runner.num_pages, runner.config.max_model_len) == (10, 10 * BLOCK_SIZE)
    assert "holds 160 tokens" in caplog.text
    with pytest.raises(ConfigError, match=f"at least {4 * page_bytes} bytes"):
        load(directory, kv_bytes=4 * page_bytes - 1)
    with pytest.raises(ConfigError, match="do not fit"):
        load(directory, kv_bytes=1 << 50)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_the_whole_pool_is_resident_before_the_first_step(checkpoint: MakeCheckpoint, load: Load) -> None:
    pool = load(checkpoint("llama2")).pool
    assert pool.data_ptr() % mmap.PAGESIZE == 0
    resident = (ctypes.c_ubyte * -(-pool.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(pool.nbytes), resident) == 0
    assert all(page & 1 for page in resident)
    assert not pool.any()


def test_a_window_is_in_effect_if_it_is_shorter_than_the_context(checkpoint: MakeCheckpoint, load: Load) -> None:
    directory = checkpoint("mistral", sliding_window=64)
    assert load(directory).config.windows == (64, 64, 64)
    runner = load(directory, max_model_len=64)
    assert not runner.config.has_windows
    assert runner.fingerprint != load(directory).fingerprint
    assert not load(checkpoint("mistral", sliding_window=4096)).config.has_windows


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_decode_reads_only_the_experts_of_its_token(checkpoint: MakeCheckpoint, family: str) -> None:
    directory = checkpoint(family)
    runner = TorchRunner(directory, dtype="bfloat16", device="cpu", kv_bytes=32 << 20, max_model_len=0)
    experts = runner.config.experts
    assert experts is not None
    pager, decoder = Pager(runner), runner._model
    sequence = pager.start(prompt_of(40))
    pager.step([(sequence, 40)])
    one = 3 * experts.width * runner.config.hidden_size * 2  # bytes
    for _ in range(5):
        before = decoder.expert_bytes
        pager.step([(sequence, 1)])
        assert decoder.expert_bytes - before == runner.config.num_layers * experts.per_token * one


def test_a_missing_gpu_is_reported(checkpoint: MakeCheckpoint) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="--device cuda: there is no GPU here"):
        TorchRunner(checkpoint("llama2"), dtype="auto", device="cuda", kv_bytes=1 << 20, max_model_len=0)


def test_progress_goes_from_nothing_to_all(checkpoint: MakeCheckpoint) -> None:
    seen: list[tuple[str, float]] = []
    TorchRunner(
        checkpoint("llama2"),
        dtype="auto",
        device="auto",
        kv_bytes=1 << 20,
        max_model_len=0,
        on_progress=lambda what, fraction: seen.append((what, fraction)),
    )
    for doing in ("preparing kernels", "loading weights"):
        fractions = [fraction for what, fraction in seen if what == doing]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0, 1)
