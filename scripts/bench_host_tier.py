"""Times first tokens from host memory: `python -m scripts.bench_host_tier` from the repository's root; half a minute.

A prompt of 2,048 + 8 tokens is timed in three ways in turn: computed; with its blocks loaded from host memory (the page
pool holds one such prompt, and another one evicted it); and with its blocks in the pool. One engine with all cores,
without HTTP, runs the small model of `scripts/bench_main_path.py`.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel
from engine.execution.cpu.lanes import own_cores, use_threads
from engine.execution.runner import TorchRunner
from engine.model.config import load_config
from engine.profile.labels import profile_labels
from engine.profile.rough import measure_rough_profile
from models.tiny.make import write
from scripts.bench_main_path import MODEL
from scripts.engine_driver import EngineDriver

PREFIX, TAIL = 2048, 8
NUM_PAGES = 140
SLOTS = 1024


def first_token_ms(driver: EngineDriver, tokens: list[int]) -> float:
    """TTFT of a prompt on an idle engine."""
    start_s = time.perf_counter()
    driver.add(tokens, 1)
    while not driver.step():
        pass
    taken_ms = 1e3 * (time.perf_counter() - start_s)
    driver.finish()
    return taken_ms


def main(rounds: int) -> None:
    """Measures and prints medians."""
    use_threads(own_cores())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write(path, **MODEL)
        kv_bytes = NUM_PAGES * load_config(path).page_bytes("bfloat16")
        runner = TorchRunner(
            path, dtype="bfloat16", device="cpu", kv_bytes=kv_bytes, max_model_len=NUM_PAGES * BLOCK_SIZE, lanes=False
        )
        profile = measure_rough_profile(
            runner, NUM_PAGES * BLOCK_SIZE, **profile_labels(path, runner.dtype, runner.pool.device)
        )
    host = runner.host_memory(SLOTS * runner.page_bytes, checksums=False)
    driver = EngineDriver(
        runner, Colocation(PerfModel(profile)), max_len=NUM_PAGES * BLOCK_SIZE, max_num_seqs=4, host=host
    )
    rng = np.random.default_rng(1)
    times: dict[str, list[float]] = {"computed": [], "from host memory": [], "from the pool": []}
    for _ in range(rounds):
        first, other = (rng.integers(0, runner.config.vocab_size, PREFIX + TAIL).tolist() for _ in range(2))
        times["computed"].append(first_token_ms(driver, first))
        first_token_ms(driver, other)
        times["from host memory"].append(first_token_ms(driver, first))
        times["from the pool"].append(first_token_ms(driver, first))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, pages of {runner.page_bytes >> 10} KiB"
    )
    print(f"copies back at {runner.page_bytes / host.slot_ms / 1e6:.1f} GB/s; {driver.host_blocks}")
    for name, taken in times.items():
        median, least = statistics.median(taken), min(taken)
        print(f"{name:>18}: median {median:8.1f} ms, best {least:8.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the three ways")
    main(parser.parse_args().rounds)
