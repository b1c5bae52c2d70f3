"""How many times the throughput of Hugging Face transformers' continuous batching does the engine have?

Qwen3 4B's shape in bfloat16 with random weights, in both on the same GPU, one after the other: 64 prompts of 512
tokens, all there from the start, 256 tokens for each, greedy. Only computing counts: models are loaded, kernels
compiled and graphs captured before.

Usage: `python -m scripts.gpu.transformers_batching [--out DIR]`
"""

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel
from engine.profile.about import about
from engine.profile.rough import time_a_few_steps
from scripts.engine_driver import EngineDriver, as_in_a_worker
from scripts.gpu.common import require, run_experiment
from scripts.gpu.models import MODELS
from scripts.gpu.random_model import random_runner
from scripts.gpu.results import Report, Target
from scripts.gpu.serving import MIXED_BUDGET

QUESTION = "How many times the throughput of transformers' continuous batching does the engine have?"
MODEL = "Qwen3-4B"
PROMPTS, PROMPT, OUTPUT = 64, 512, 256
WARM_UP = (4, 8)
"""Prompts and output tokens of a run that does not count."""
MIN_GAIN = Target(at_least=3.0)


def measure_all(
    report: Report, fields: Mapping[str, object], device: str = "cuda", limits: Mapping[str, int] | None = None
) -> None:
    """Every figure, for a model of this config.json.

    Args:
        limits: Of transformers' cache and steps, as `ContinuousBatchingConfig` names them; None: its own choice, for
            which it takes all of the memory that is free.
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
    """Output tokens a second, with prompts in chunks beside decodes."""
    room = PROMPTS * (PROMPT + OUTPUT + 64)
    runner = random_runner(fields, tokens=room, graph_decodes=PROMPTS, device=device)
    max_len = runner.config.max_model_len
    profile = time_a_few_steps(runner, max_len, **about(Path(MODEL), runner.dtype, runner.pool.device))
    rule = Colocation(PerfModel(profile), token_budget=MIXED_BUDGET, mode="mixed")
    for prompts, output in (WARM_UP, (PROMPTS, OUTPUT)):  # each with an empty cache of prompts
        driver = EngineDriver(runner, rule, max_len=max_len, max_num_seqs=PROMPTS)
        began = time.perf_counter()
        left = {driver.add(prompt, output) for prompt in _prompts(prompts, runner.config.vocab_size)}
        while left:
            left -= {one.request_id for one in driver.step() if one.finish is not None}
        seconds = time.perf_counter() - began
    return PROMPTS * OUTPUT / seconds


def _transformers_tokens_s(fields: Mapping[str, object], device: str, limits: Mapping[str, int]) -> tuple[float, str]:
    """Output tokens a second, and which attention it used."""
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
    # What it does before it takes requests does not count.
    seconds = max(one.timestamps[-1] for one in outputs) - min(one.created_time for one in outputs)
    # It may choose another one for as long as it serves.
    attention = next((call.args[0] for call in chosen.call_args_list), model.config._attn_implementation)
    return PROMPTS * OUTPUT / seconds, f"transformers {transformers.__version__}, attention {attention}"


def run(report: Report) -> None:
    """See the module. Without FlashInfer the engine has neither its attention nor graphs."""
    require("flashinfer", "flashinfer-python")
    as_in_a_worker()
    require("transformers", "transformers")
    measure_all(report, MODELS[MODEL])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    return run_experiment("transformers_batching", QUESTION, run, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
