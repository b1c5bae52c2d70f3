"""Measures the sampler on a CPU: ms per step for a vocabulary of 152k tokens, after 2,000 different ones.

Usage: `python -m scripts.bench_sampling`, from the repository's root.
"""

import time

import numpy as np
import torch

from engine.batch import SampleRow
from engine.execution.sampling.sampler import Sampler
from engine.ops import make_ops
from engine.ops.base import Heads
from engine.types import SamplingParams

VOCAB = 151_936
REPEAT = 50
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top_k 20": SamplingParams(temperature=0.7, top_k=20),
    "top_k 20, top_p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "top_p 0.8": SamplingParams(temperature=0.7, top_p=0.8),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 20, top_p 0.8, repetition 1.05": SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05
    ),
    "greedy, 5 top_logprobs": SamplingParams(temperature=0.0, top_logprobs=5),
}


def main() -> None:
    torch.manual_seed(0)
    ops = make_ops(torch.device("cpu"), torch.bfloat16, Heads(1, 1, 64))
    sampler, tokens = Sampler(VOCAB, ops=ops), np.arange(2000, dtype=np.int32)
    print(f"{torch.get_num_threads()} threads, {VOCAB} tokens; fastest of {REPEAT} runs\n")
    print("| sampling | 1 row, ms | 16 rows, ms |\n| --- | --- | --- |")
    for name, params in KINDS.items():
        cells = []
        for count in (1, 16):
            logits = torch.randn(count, VOCAB).bfloat16()
            rows = [SampleRow(row, params, 0, len(tokens), tokens, 50) for row in range(count)]
            times = []
            for _ in range(REPEAT):
                start_s = time.perf_counter()
                sampler.sample(logits, rows)
                times.append(1e3 * (time.perf_counter() - start_s))
            cells.append(f"{min(times):.3g}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
