"""Measures the engine beside llama.cpp on a CPU, with the same weights: bf16, 8 bits (Q8_0) and 4 bits (Q4_0).

Usage, from the repository's root, on an otherwise idle machine; about ten minutes:

    python -m venv ~/llama && CMAKE_ARGS=-DGGML_NATIVE=ON ~/llama/bin/pip install llama-cpp-python
    python -m scripts.bench_llama --llama ~/llama/bin/python [--threads N] [--rounds N]

The model has the shape of Qwen2 0.5B and random weights. It is written as three GGUF files (1.9 GB, kept for the next
run), which both sides read. In each round and for each format the sides take turns, and a plain read of memory follows.

- decode: tokens/s of 1 and of 8 streams, after prompts of 128 tokens.
- prefill: tokens/s of a prompt of 512 tokens.
- share: the bytes of weights that a decode reads, a second, relative to the plain read.

The engine is that of a worker, with scheduling and sampling; llama.cpp computes random tokens and samples nothing.
"""

import argparse
import json
import os
import subprocess
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in production; torch reads it when it is loaded

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Types
from gguf.quants import quantize

from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel
from deploy.gguf_model import directory_of
from engine.execution.cpu.lanes import own_cores, use_threads
from engine.execution.runner import TorchRunner
from engine.model.gguf_file import read_gguf
from engine.profile.labels import profile_labels
from engine.profile.rough import measure_rough_profile
from scripts.engine_driver import EngineDriver, as_in_a_worker

HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 896, 24, 14, 2, 4864, 151_936
FORMATS = {"bf16": (Types.BF16, Types.BF16), "Q8_0": (Types.Q8_0, Types.Q8_0), "Q4_0": (Types.Q4_0, Types.Q8_0)}
"""Types of linear layers, and of the embedding, which is the head, too: llama.cpp's own choice."""

MAX_LEN = 1024
READ_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """What is measured: decodes, or the prompt if `output` is 0."""

    name: str
    streams: int
    prompt: int
    output: int


CASES = [Case("decode 1", 1, 128, 64), Case("decode 8", 8, 128, 64), Case("prefill 512", 1, 512, 0)]

Measure = Callable[[str, Case], float]
"""Measures a case of a format. Returns seconds."""


def write_models(directory: Path) -> dict[str, Path]:
    """Writes the files that are missing. Returns the file of each format."""
    paths = {name: directory / f"{name}.gguf" for name in FORMATS}
    if all(path.exists() for path in paths.values()):
        return paths
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = {name: path.with_suffix(".unfinished") for name, path in paths.items()}
    writers = {name: gguf.GGUFWriter(path, "qwen2") for name, path in unfinished.items()}
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weight = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        for kind, writer in writers.items():
            of_layers, of_embedding = FORMATS[kind]
            own = Types.F32 if len(shape) == 1 else of_embedding if name == "token_embd.weight" else of_layers
            writer.add_tensor(name, quantize(weight, own), raw_dtype=own)

    for writer in writers.values():
        _add_metadata(writer)
    add("token_embd.weight", VOCAB, HIDDEN)
    keys = KV_HEADS * HIDDEN // HEADS
    for layer in range(LAYERS):
        for part, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", keys, HIDDEN),
            ("attn_v", keys, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", WIDTH, HIDDEN),
            ("ffn_up", WIDTH, HIDDEN),
            ("ffn_down", HIDDEN, WIDTH),
        ):
            add(f"blk.{layer}.{part}.weight", rows, columns)
            if part in ("attn_q", "attn_k", "attn_v"):
                add(f"blk.{layer}.{part}.bias", rows)
        for part in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{part}.weight", HIDDEN)
    add("output_norm.weight", HIDDEN)
    for name, writer in writers.items():
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished[name].rename(paths[name])
    return paths


def _add_metadata(writer: gguf.GGUFWriter) -> None:
    """The shape, and a tokenizer that nobody uses: both sides get numbers of tokens."""
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", *(f"token{number}" for number in range(3, VOCAB))])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCAB - 1)


class Ours:
    """The engine, with one model for each format."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._rng = np.random.default_rng(0)
        self._drivers = {name: self._load(path) for name, path in paths.items()}

    def _load(self, path: Path) -> EngineDriver:
        directory = directory_of(path)
        runner = TorchRunner(
            directory, dtype="bfloat16", device="cpu", kv_bytes=256 << 20, max_model_len=MAX_LEN, lanes=False
        )
        profile = measure_rough_profile(runner, MAX_LEN, **profile_labels(directory, runner.dtype, runner.pool.device))
        rule = Colocation(PerfModel(profile), token_budget=MAX_LEN, mode="mixed")
        return EngineDriver(runner, rule, max_len=MAX_LEN, max_num_seqs=8)

    def measure(self, name: str, case: Case) -> float:
        """See `Measure`."""
        driver = self._drivers[name]
        began = time.perf_counter()
        left: dict[str, int] = {}
        for _ in range(case.streams):
            prompt = self._rng.integers(0, VOCAB, case.prompt).tolist()
            left[driver.add(prompt, 1 + case.output)] = 1 + case.output
        while case.output and max(left.values()) > case.output:  # until the last stream has its first token
            self._step(driver, left)
        decoded = sum(left.values())
        if case.output:
            began = time.perf_counter()
        while any(left.values()):
            self._step(driver, left)
        seconds = time.perf_counter() - began
        driver.finish()
        return seconds * (case.streams * case.output / decoded if case.output else 1.0)

    @staticmethod
    def _step(driver: EngineDriver, left: dict[str, int]) -> None:
        for output in driver.step():
            left[output.request_id] -= len(output.token_ids)


@contextmanager
def llama(python: Path, threads: int, paths: Mapping[str, Path]) -> Iterator[Measure]:
    """Runs llama.cpp in a process of its own, and loads the models."""
    script = Path(__file__).with_name("llama_side.py")
    with subprocess.Popen(
        [str(python), str(script), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        commands, results = process.stdin, process.stdout
        assert commands is not None
        assert results is not None

        def read() -> Any:
            if not (line := results.readline()):
                raise SystemExit(f"llama.cpp ended; see above. {python} must have llama-cpp-python")
            return json.loads(line)

        def ask(**command: Any) -> Any:
            print(json.dumps(command), file=commands, flush=True)
            return read()

        print(f"llama-cpp-python {read()}")
        for name, path in paths.items():
            ask(load=str(path), name=name)
        yield lambda name, case: float(ask(measure=name, streams=case.streams, prompt=case.prompt, output=case.output))
        commands.close()


def weight_bytes(path: Path) -> int:
    """Bytes of all tensors: each is read in each step, the embedding as the head."""
    return sum(tensor.end - tensor.begin for tensor in read_gguf(path).tensors.values())


def with_error(ratios: Sequence[float]) -> str:
    """Mean and standard error."""
    return f"{statistics.mean(ratios):.2f} ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.2f}"


def bench(paths: Mapping[str, Path], sides: Mapping[str, Measure], rounds: int) -> None:
    """Measures in turns. Prints a table with a line for each case and format."""
    memory = torch.ones(READ_BYTES // 4)
    times: dict[tuple[str, str, str], list[float]] = {}
    reads: list[float] = []
    for turn in range(-1, rounds):  # the first turn warms up
        for name in paths:
            for case in CASES:
                for side in list(sides) if turn % 2 else reversed(list(sides)):
                    seconds = sides[side](name, case)
                    if turn >= 0:
                        times.setdefault((case.name, name, side), []).append(seconds)
            began = time.perf_counter()
            memory.sum()
            if turn >= 0:
                reads.append(time.perf_counter() - began)
        print(f"round {turn + 1} of {rounds}", flush=True)
    read = READ_BYTES / statistics.median(reads)
    print(f"\nA plain read: {read / 1e9:.1f} GB/s, median of {len(reads)}.\n")
    print("| step | format | llama.cpp, tokens/s | ours, tokens/s | ratio | share, llama.cpp | share, ours |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for name, path in paths.items():
            theirs, ours = times[case.name, name, "llama.cpp"], times[case.name, name, "ours"]
            tokens = case.streams * case.output or case.prompt
            read_bytes = weight_bytes(path) * case.output
            cells = [f"{tokens / statistics.median(each):.1f}" for each in (theirs, ours)]
            cells.append(with_error([before / after for before, after in zip(theirs, ours, strict=True)]))
            cells += [
                f"{read_bytes / statistics.median(each) / read:.0%}" if case.output else "" for each in (theirs, ours)
            ]
            print(f"| {case.name} | {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measures all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=own_cores(), help="of each side; default: all cores")
    parser.add_argument("--rounds", type=int, default=8, help="2 or more; default: 8")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir(), "cpd-bench-llama"),
        help="for the models; default: %(default)s",
    )
    options = parser.parse_args()
    as_in_a_worker()
    use_threads(options.threads)
    print("writing models" if not options.directory.exists() else f"models of {options.directory}", flush=True)
    paths = write_models(options.directory)
    print(f"{options.threads} threads, torch {torch.__version__}", flush=True)
    ours = Ours(paths)
    with llama(options.llama, options.threads, paths) as theirs:
        bench(paths, {"llama.cpp": theirs, "ours": ours.measure}, options.rounds)


if __name__ == "__main__":
    main()
