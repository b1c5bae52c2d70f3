"""How does the engine's throughput compare with Hugging Face transformers' continuous batching?

Both run a model of Qwen3 4B's shape with random bfloat16 weights on the same GPU, one after the other: 64 prompts of
512 tokens, all queued at the start, 256 greedy tokens each. Loading, compiling and capturing graphs do not count.
"""

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel
from engine.profile.labels import profile_labels
from engine.profile.rough import measure_rough_profile
from scripts.engine_driver import EngineDriver, as_in_a_worker
from scripts.gpu.common import require
from scripts.gpu.models import MODELS
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Report, Target
from scripts.gpu.serving import MIXED_BUDGET

MODEL = "Qwen3-4B"
PROMPTS, PROMPT, OUTPUT = 64, 512, 256
WARM_UP = (4, 8)
"""Prompts and output tokens of the warm-up run."""
MIN_GAIN = Target(at_least=3.0)


def measure_all(
    report: Report, fields: Mapping[str, object], device: str = "cuda", limits: Mapping[str, int] | None = None
) -> None:
    """Measures all figures of a model with these config.json fields.

    Args:
        limits: Fields of transformers' `ContinuousBatchingConfig`; with None it takes all free memory.
    """
    own = _engine_tokens_s(fields, device)
    report.add(f"{MODEL}: {PROMPTS} x {PROMPT} + {OUTPUT}, engine", own, "tokens/s")
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    theirs, how = _transformers_tokens_s(fields, device, limits or {})
    report.add(f"{MODEL}: {PROMPTS} x {PROMPT} + {OUTPUT}, transformers", theirs, "tokens/s", note=how)
    report.add(f"{MODEL}: engine / transformers, throughput", own / theirs, "ratio", target=MIN_GAIN)


def _prompts(count: int, vocab_size: int) -> list[list[int]]:
    return [np.random.default_rng(index).integers(vocab_size, size=PROMPT).tolist() for index in range(count)]


def _engine_tokens_s(fields: Mapping[str, object], device: str) -> float:
    """Output tokens a second with mixed batches."""
    room = PROMPTS * (PROMPT + OUTPUT + 64)
    runner = random_runner(fields, tokens=room, graph_decodes=PROMPTS, device=device)
    max_len = runner.config.max_model_len
    profile = measure_rough_profile(runner, max_len, **profile_labels(Path(MODEL), runner.dtype, runner.pool.device))
    rule = Colocation(PerfModel(profile), token_budget=MIXED_BUDGET, mode="mixed")
    for prompts, output in (WARM_UP, (PROMPTS, OUTPUT)):  # each with an empty prefix cache
        driver = EngineDriver(runner, rule, max_len=max_len, max_num_seqs=PROMPTS)
        began = time.perf_counter()
        left = {driver.add(prompt, output) for prompt in _prompts(prompts, runner.config.vocab_size)}
        while left:
            left -= {one.request_id for one in driver.step() if one.finish is not None}
        seconds = time.perf_counter() - began
    return PROMPTS * OUTPUT / seconds


def _transformers_tokens_s(fields: Mapping[str, object], device: str, limits: Mapping[str, int]) -> tuple[float, str]:
    """Output tokens a second, and the attention it used."""
    transformers = require("transformers", "transformers")
    shape = {name: value for name, value in fields.items() if name not in ("model_type", "torch_dtype")}
    config = transformers.AutoConfig.for_model(fields["model_type"], **shape)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = transformers.ContinuousBatchingConfig(**limits)
    with patch.object(model, "set_attn_implementation", wraps=model.set_attn_implementation) as chosen:
        for prompts, output in (WARM_UP, (PROMPTS, OUTPUT)):
            outputs = model.generate_batch(
                _prompts(prompts, config.vocab_size),
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
                ),
                continuous_batching_config=cache,
                record_timestamps=True,
            ).values()
    if failed := [one.error or "too few tokens" for one in outputs if len(one.generated_tokens) != OUTPUT]:
        raise RuntimeError(f"transformers failed {len(failed)} of {PROMPTS} requests: {failed[0]}")
    # Its set-up before the first request does not count.
    seconds = max(one.timestamps[-1] for one in outputs) - min(one.created_time for one in outputs)
    # It may switch to another attention while it serves.
    attention = next((call.args[0] for call in chosen.call_args_list), model.config._attn_implementation)
    return PROMPTS * OUTPUT / seconds, f"transformers {transformers.__version__}, attention {attention}"


def run(report: Report) -> None:
    """Runs the experiment. Needs FlashInfer: the engine has no attention kernel and no graphs without it."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    require("transformers", "transformers")
    measure_all(report, MODELS[MODEL])
