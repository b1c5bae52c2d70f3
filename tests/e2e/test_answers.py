"""Answers equal those of transformers, on every route and in every batch."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Types

from deploy.model import resolve_model
from tests.checkpoints import FAMILIES
from tests.conftest import MakeCheckpoint
from tests.e2e.client import MODEL, Answer, client, complete, complete_all
from tests.e2e.cluster import Cluster
from tests.e2e.oracle import Oracle
from tests.gguf_files import write_gguf

pytestmark = pytest.mark.e2e

LONG = 64
LENGTHS = [3, 16, 33, 64, 65, 80, 150, 257, 400, 1500]
BF16_MARGIN = 0.25
"""About three times the rounding error here; a wrong page or position changes scores by more than 1."""
PAGE_BYTES = 3 * 2 * 2 * 16 * 32 * 4
MIXED_LENGTHS = [5 + 37 * index % 300 for index in range(16)]


def expected_route(length: int) -> str:
    return "remote" if length > LONG else "local"


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_answers_equal_those_of_transformers(family: str, checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint(family)
    oracle = Oracle(directory)
    with Cluster(model=str(directory), served_model_name=MODEL, long_prefill_tokens=LONG) as cluster:
        prompts = oracle.prompts(LENGTHS, seed=1)
        alone = await complete_all(cluster.url, prompts, at_once=1)
        for prompt, answer in zip(prompts, alone, strict=True):
            oracle.check(prompt, answer.token_ids)
            assert len(answer.token_ids) == 16
            assert answer.finish == "length"
            assert (answer.route, answer.cached_tokens) == (expected_route(len(prompt)), 0)

        again = await complete_all(cluster.url, prompts[::-1], at_once=4)
        for prompt, answer in zip(prompts[::-1], again, strict=True):
            oracle.check(prompt, answer.token_ids)
            assert answer.route == "local"  # everything is cached
            assert answer.cached_tokens >= (len(prompt) - 1) // 16 * 16

        mixed = oracle.prompts(MIXED_LENGTHS, seed=2)
        for prompt, answer in zip(mixed, await complete_all(cluster.url, mixed, at_once=16), strict=True):
            oracle.check(prompt, answer.token_ids)
            assert answer.route == expected_route(len(prompt))
        cluster.wait_until_idle()


async def test_bfloat16_answers_are_within_rounding_of_transformers(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3", dtype="bfloat16")
    oracle = Oracle(directory)
    with Cluster(
        model=str(directory), served_model_name=MODEL, long_prefill_tokens=LONG, dtype="auto", kv_checksum=True
    ) as cluster:
        prompts = oracle.prompts(MIXED_LENGTHS, seed=6)
        for temperature in (0.0, 1.0):
            answers = await complete_all(cluster.url, prompts, at_once=16, temperature=temperature, seed=99)
            for prompt, answer in zip(prompts, answers, strict=True):
                oracle.check(prompt, answer.token_ids, temperature=temperature, seed=99, margin=BF16_MARGIN)


@pytest.mark.parametrize(("quantization", "kv_dtype"), [("int8", "auto"), ("int4", "int8"), ("none", "int8")])
async def test_quantised_answers_are_the_same_on_any_route_and_in_any_batch(
    checkpoint: MakeCheckpoint, quantization: str, kv_dtype: str
) -> None:
    directory = checkpoint("qwen3_moe", moe_intermediate_size=64)
    prompts = Oracle(directory).prompts(MIXED_LENGTHS, seed=9)
    settings = {
        "long_prefill_tokens": LONG,
        "quantization": quantization,
        "kv_dtype": kv_dtype,
        "kv_checksum": True,
    }
    with Cluster(model=str(directory), served_model_name=MODEL, **settings) as cluster:
        together = await complete_all(cluster.url, prompts, at_once=16)
        assert {answer.route for answer in together} == {"local", "remote"}
        cached = await complete_all(cluster.url, prompts, at_once=1)
        cluster.kill("combined-0")  # and so empties its cache
        cluster.wait_until_healthy()
        alone = await complete_all(cluster.url, prompts, at_once=1)
        for answers in (cached, alone):
            assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in together]
        cluster.wait_until_idle()


async def test_a_gguf_file_is_served(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    original = checkpoint("llama2")
    write_gguf(original, tmp_path / "model.gguf", {"": Types.F32})
    oracle = Oracle(original)
    model = resolve_model(str(tmp_path / "model.gguf"))
    with Cluster(model=str(model), served_model_name=MODEL, long_prefill_tokens=LONG) as cluster:
        prompts = oracle.prompts([5, 100], seed=1)
        for prompt, answer in zip(prompts, await complete_all(cluster.url, prompts, at_once=2), strict=True):
            oracle.check(prompt, answer.token_ids)


async def test_answers_are_right_when_pages_run_out(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3")
    oracle = Oracle(directory)
    settings = {"kv_memory": 40 * PAGE_BYTES, "max_model_len": 512, "long_prefill_tokens": LONG}
    with Cluster(model=str(directory), served_model_name=MODEL, **settings) as cluster:
        prompts = oracle.prompts([60, 90] * 8, seed=3)
        for prompt, answer in zip(
            prompts, await complete_all(cluster.url, prompts, at_once=16, max_tokens=100), strict=True
        ):
            oracle.check(prompt, answer.token_ids)
            assert len(answer.token_ids) == 100
        state = cluster.wait_until_idle()
        assert sum(worker["load"]["preemptions"] for worker in state["workers"]) > 0


async def test_answers_are_right_with_pages_loaded_back_from_host_memory(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen3")
    oracle = Oracle(directory)
    settings = {"kv_memory": 16 * PAGE_BYTES, "host_kv_memory": 64 * PAGE_BYTES, "max_model_len": 256}
    with Cluster(model=str(directory), served_model_name=MODEL, prefill=0, kv_checksum=True, **settings) as cluster:
        prompts = oracle.prompts([150, 170, 200, 220], seed=8)  # the pool has room for one of them
        for round_number in range(2):
            for prompt, answer in zip(prompts, await complete_all(cluster.url, prompts, at_once=1), strict=True):
                oracle.check(prompt, answer.token_ids)
                assert answer.cached_tokens == round_number * (len(prompt) // 16 * 16)
        async with client(cluster.url) as http:
            body = {"model": MODEL, "prompt": prompts[0], "max_tokens": 1}
            request_id = (await http.post("/v1/completions", json=body)).headers["x-request-id"]
            (placement,) = (await http.get(f"/requests/{request_id}")).json()["placements"]
        assert placement["predicted"]["uncached_tokens"] == 150 - placement["actual"]["cached_tokens"] == 150 % 16
        assert placement["predicted"]["host_tokens"] > 0
        assert "loaded from host memory" in placement["why"]
        (worker,) = cluster.wait_until_idle()["workers"]
        host = worker["load"]["host"]
        assert host["pages"] == 64
        assert host["blocks"]["loaded"] > 0
        assert "damaged" not in host["blocks"]


async def test_seeded_answers_are_the_same_in_any_batch_and_on_any_route(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("llama3")
    oracle = Oracle(directory)
    prompts = oracle.prompts([20, 70, 100, 200] * 2, seed=4)
    fields = {"temperature": 1.0, "seed": 1234, "max_tokens": 24}
    with Cluster(model=str(directory), served_model_name=MODEL, long_prefill_tokens=16) as cluster:
        never_remote = cluster.add_router(long_prefill_tokens=100_000)
        passes: dict[str, list[Answer]] = {
            "remote, together": await complete_all(cluster.url, prompts, at_once=8, **fields),
            "cached, alone": await complete_all(cluster.url, prompts, at_once=1, **fields),
        }
        cluster.kill("combined-0")  # and so empties its cache
        cluster.wait_until_healthy()
        passes["local, together"] = await complete_all(never_remote, prompts, at_once=8, **fields)
        cluster.kill("combined-0")
        cluster.wait_until_healthy()
        passes["local, alone"] = await complete_all(never_remote, prompts, at_once=1, **fields)
    for name, answers in passes.items():
        assert {answer.route for answer in answers} == {"remote" if "remote" in name else "local"}
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check(prompt, answer.token_ids, temperature=1.0, seed=1234)


async def test_choices_share_one_prefill_and_differ(checkpoint: MakeCheckpoint) -> None:
    directory = checkpoint("qwen2")
    oracle = Oracle(directory)
    [prompt] = oracle.prompts([90], seed=5)
    with Cluster(model=str(directory), served_model_name=MODEL, long_prefill_tokens=LONG) as cluster:
        async with client(cluster.url) as http:
            body = {"model": MODEL, "prompt": prompt, "n": 4, "seed": 7, "max_tokens": 20, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json={**body, "return_token_ids": True})).json()
            alone = await complete(http, prompt, temperature=1.0, seed=7, max_tokens=20)
        state = cluster.wait_until_idle()
    outputs = [choice["token_ids"] for choice in answer["choices"]]
    for index, output in enumerate(outputs):
        oracle.check(prompt, output, temperature=1.0, seed=7, choice=index)
    oracle.check(prompt, alone.token_ids, temperature=1.0, seed=7)
    assert len({tuple(output) for output in outputs}) == 4
    assert sum(worker["load"]["prefill_tokens"] for worker in state["workers"]) < 2 * len(prompt)
