"""Measures the main path over HTTP: `python -m scripts.bench_main_path` from the repository's root.

1. Throughput: one combined worker with all cores; 512 tokens in, 128 out, concurrency 16. With `--tls` also as between
   machines, with TLS for clients, sessions and prefill requests: two clusters take turns, and the ratio is printed.
2. The remote route: a prefill and a combined worker with half of the cores each; one 512-token prompt at a time,
   alternately prefilled locally and remotely, so that both meet the same load of the machine.
3. The exposed part of the transfer (with `--only exposed`): the same with 2,048-token prompts and 0.44 billion weights.
   The first token never waits for pages; if the last chunk's pages take longer than a decode step, the gap after it
   grows. Sends as many prompts as fit into `--seconds`, at most five by each route.

The model of 1 and 2 has 4 layers, hidden size 256, 4 heads, 2 KV heads, a vocabulary of 4,096 and random bfloat16
weights. The load generator is that of `cpd bench`.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.prepare import prepare
from bench.record import Record
from bench.report.progress import LiveProgress
from bench.report.text import interval, number
from bench.result import Summary
from bench.run import measure
from bench.settings import RunSettings
from bench.tokens import Texts
from models.tiny.make import write
from scripts.bench_lanes import LARGE
from scripts.streams import MODEL_NAME, alternate, check_routes, machine, ttft_ms
from tests.certificates import certificate_files
from tests.e2e.cluster import Cluster

INPUT_LEN, OUTPUT_LEN, CONCURRENCY = 512, 128, 16
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
ONE_COMBINED = {"prefill": 0, "kv_memory": "256MiB"}
PAIRS = 40
LONG_MODEL = {
    **LARGE,
    "vocab_size": MODEL["vocab_size"],
}  # the tokenizer knows every token, so all show
LONG_INPUT_LEN, LONG_OUTPUT_LEN, LONG_PAIRS = 2048, 16, 5
WARM_INPUT_LEN = 256


def bench_settings(url: str, model: Path, requests: int) -> RunSettings:
    """The load of part 1."""
    return RunSettings.load(
        {
            "url": url,
            "endpoint": "completions",
            "tokenizer": str(model),
            "input_len": str(INPUT_LEN),
            "output_len": str(OUTPUT_LEN),
            "concurrency": CONCURRENCY,
            "num_requests": requests,
        }
    )


def row(summary: Summary) -> str:
    """Formats one line of the table."""
    rate, ttft, itl = summary.output_tokens_per_s, summary.ttft_ms, summary.itl_ms
    return (
        f"{number(rate):>7} tok/s   TTFT p50 {number(ttft.p50)} ms ({interval(ttft.ci.get('p50'))})   "
        f"ITL p50 {number(itl.p50)} p99 {number(itl.p99)} ms ({interval(itl.ci.get('p99'))})"
    )


def measure_throughput(model: Path, repeats: int, requests: int) -> None:
    """Measures and prints throughput and latency of one combined worker."""
    with _cluster(model, **ONE_COMBINED) as cluster:
        _throughput(cluster, model, 2 * CONCURRENCY)  # warms up
        for _ in range(repeats):
            print(row(_throughput(cluster, model, requests)))


def measure_tls(model: Path, repeats: int, requests: int) -> None:
    """Measures and prints throughput and latency of one combined worker without TLS and with it, in turn."""
    rates: dict[str, list[float]] = {"plain": [], "TLS": []}
    with tempfile.TemporaryDirectory() as directory:
        cert, key = certificate_files(Path(directory))
        os.environ["SSL_CERT_FILE"] = str(cert)  # which the client trusts
        with (
            _cluster(model, **ONE_COMBINED) as plain,
            _cluster(model, **ONE_COMBINED, host="0.0.0.0", tls_cert=cert, tls_key=key) as tls,
        ):
            clusters = {"plain": plain, "TLS": tls}
            for cluster in clusters.values():
                _throughput(cluster, model, 2 * CONCURRENCY)  # warms up
            for _ in range(repeats):
                for name, cluster in clusters.items():
                    summary = _throughput(cluster, model, requests)
                    rates[name].append(summary.output_tokens_per_s or 0.0)
                    print(f"{name:5}", row(summary))
    pairs = [tls / plain for plain, tls in zip(rates["plain"], rates["TLS"], strict=True)]
    print(f"with TLS {statistics.median(pairs):.2f} of the rate (goal 0.9; {min(pairs):.2f} to {max(pairs):.2f})")


def _throughput(cluster: Cluster, model: Path, requests: int) -> Summary:
    settings = bench_settings(cluster.url, model, requests)
    with LiveProgress(Console(stderr=True)) as progress:
        result = measure(settings, prepare(settings), None, None, progress)
    if result.summary.completed != requests:
        raise RuntimeError(f"not all requests completed: {result.summary.errors}")
    for reason in result.client.reasons:
        print(reason)
    return result.summary


def _cluster(model: Path, **settings: object) -> Cluster:
    return Cluster(model=str(model), served_model_name=MODEL_NAME, dtype="auto", **settings)


def measure_remote(model: Path) -> None:
    """Measures and prints the time that the remote route adds."""
    with _cluster(model, long_prefill_tokens=INPUT_LEN - 1, kv_memory="256MiB", prefill=1, combined=1) as cluster:
        urls = {"local": cluster.add_router(long_prefill_tokens=INPUT_LEN), "remote": cluster.url}
        prompt = partial(Texts.with_tokenizer(model).text, np.random.default_rng(1), INPUT_LEN)
        asyncio.run(alternate(urls, prompt, PAIRS, OUTPUT_LEN))  # warms up
        by_route = asyncio.run(alternate(urls, prompt, PAIRS, OUTPUT_LEN))
    check_routes(by_route)
    ttft, gap = {}, {}
    for route, records in by_route.items():
        ttft[route] = ttft_ms(records)
        gap[route] = statistics.median(record.content_s[1] - record.content_s[0] for record in records) * 1e3
        print(f"{route:6}   TTFT p50 {ttft[route]:6.1f} ms   first gap p50 {gap[route]:5.1f} ms")
    print(
        f"remote adds {ttft['remote'] - ttft['local']:+.1f} ms to TTFT (target < 10)"
        f" and {gap['remote'] - gap['local']:+.1f} ms to the first gap (target < 40)"
    )


def measure_exposed(model: Path, seconds: float) -> None:
    """Measures and prints the exposed part of the transfer, and the TTFT of remote prefills relative to local ones."""
    by_route: dict[str, list[Record]] = {"local": [], "remote": []}
    with _cluster(model, long_prefill_tokens=WARM_INPUT_LEN - 1, kv_memory="2GiB") as cluster:
        urls = {"local": cluster.add_router(long_prefill_tokens=LONG_INPUT_LEN), "remote": cluster.url}
        prompt = partial(Texts.with_tokenizer(model).text, np.random.default_rng(1))
        asyncio.run(alternate(urls, partial(prompt, WARM_INPUT_LEN), 1, LONG_OUTPUT_LEN))  # warms up
        begin_s = time.monotonic()
        pairs = 0
        while pairs < LONG_PAIRS and (time.monotonic() - begin_s) * (1 + 1 / max(1, pairs)) <= seconds:
            pair = asyncio.run(alternate(urls, partial(prompt, LONG_INPUT_LEN), 1, LONG_OUTPUT_LEN))
            by_route = {route: [*records, *pair[route]] for route, records in by_route.items()}
            pairs += 1
    check_routes(by_route)
    ttft, exposed = {}, {}
    for route, records in by_route.items():
        ttfts_ms = [(record.content_s[0] - record.sent_s) * 1e3 for record in records]
        beyond_ms = [_beyond_a_step_s(record) * 1e3 for record in records]
        ttft[route], exposed[route] = statistics.median(ttfts_ms), statistics.median(beyond_ms)
        print(
            f"{route:6}   TTFT p50 {ttft[route]:6.0f} ms ({min(ttfts_ms):.0f} to {max(ttfts_ms):.0f})"
            f"   first gap beyond a step p50 {exposed[route]:6.1f} ms ({min(beyond_ms):.1f} to {max(beyond_ms):.1f})"
        )
    print(
        f"{pairs} of each: remote TTFT is {ttft['remote'] / ttft['local']:.3f} of local (target <= 1.08); "
        f"exposed transfer is {exposed['remote'] / ttft['remote']:.2%} of TTFT (target < 5 %)"
    )


def _beyond_a_step_s(record: Record) -> float:
    gaps = np.diff(record.content_s)
    return float(gaps[0] - np.median(gaps[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="number of throughput runs")
    parser.add_argument("--requests", type=int, default=128, help="requests in a throughput run")
    parser.add_argument("--only", choices=["throughput", "remote", "exposed"], help="measure only this part")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit for the prompts of `--only exposed`")
    parser.add_argument("--tls", action="store_true", help="measure only throughput, without TLS and with it")
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write(model, **(LONG_MODEL if arguments.only == "exposed" else MODEL))
        if arguments.tls:
            measure_tls(model, arguments.repeats, arguments.requests)
            return
        if arguments.only in (None, "throughput"):
            measure_throughput(model, arguments.repeats, arguments.requests)
        if arguments.only in (None, "remote"):
            measure_remote(model)
        if arguments.only == "exposed":
            measure_exposed(model, arguments.seconds)


if __name__ == "__main__":
    main()
