"""Metrics under the names of vLLM, as `GET /metrics` shows them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from cpd.common.buckets import TRANSFER_BYTES, TRANSFER_BYTES_PER_S, TRANSFER_S, Buckets
from cpd.rpc import cpd_pb2 as pb
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer, FakeWorker

CHAT = {"model": "small-model", "messages": [{"role": "user", "content": "Hello?"}]}
REPLY = "the quick brown fox"

Values = dict[tuple[str, str], float]


@pytest.fixture
async def worker(start_worker: StartWorker, says: Says) -> FakeWorker:
    return await start_worker(says(REPLY))


@pytest.fixture
async def router(start_router: StartRouter, worker: FakeWorker) -> Router:
    return await start_router(worker)


async def _values(router: Router) -> Values:
    """The values by name and the value of another label, if there is one. All have the model's name."""
    text = (await router.http.get("/metrics")).raise_for_status().text
    found: Values = {}
    for family in families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == "small-model"
                found[sample.name.removeprefix("vllm:"), next(iter(labels.values()), "")] = sample.value
    return found


async def test_requests_count_under_both_names(router: Router) -> None:
    response = await router.http.post("/v1/chat/completions", json=CHAT | {"n": 2, "max_tokens": 3})
    usage = response.json()["usage"]
    values = await _values(router)
    assert values["request_success_total", "length"] == 2
    assert values["prompt_tokens_total", ""] == values["prefix_cache_queries_total", ""] == usage["prompt_tokens"]
    assert values["prefix_cache_hits_total", ""] == 16
    assert values["generation_tokens_total", ""] == usage["completion_tokens"] == 6
    assert values["request_prompt_tokens_sum", ""] == usage["prompt_tokens"]
    assert (values["request_generation_tokens_count", ""], values["request_generation_tokens_sum", ""]) == (2, 6)
    assert values["inter_token_latency_seconds_count", ""] == values["time_per_output_token_seconds_count", ""] == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_prefill_time", "request_decode_time"):
        assert values[f"{name}_seconds_count", ""] == values[f"{name}_seconds_bucket", "+Inf"] == 1
    parts = sum(values[f"request_{part}_time_seconds_sum", ""] for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(values["e2e_request_latency_seconds_sum", ""])


async def test_a_histogram_sums_what_ours_has_apart(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    scripts = [says(REPLY), says(REPLY, prefill_worker="prefill-0")]

    async def one_after_the_other(submit: pb.Submit) -> AsyncIterator[Answer]:
        async for output in scripts.pop(0)(submit):
            yield output

    router = await start_router(await start_worker(one_after_the_other))
    for _ in range(2):
        (await router.http.post("/v1/chat/completions", json=CHAT)).raise_for_status()
    text = (await router.http.get("/metrics")).text
    for route in ("local", "remote"):
        assert f'cpd_ttft_seconds_count{{route="{route}"}} 1.0' in text
    assert (await _values(router))["time_to_first_token_seconds_count", ""] == 2


async def test_the_end_of_a_choice_whose_client_hangs_up_is_abort(
    start_router: StartRouter, start_worker: StartWorker, says: Says
) -> None:
    held = asyncio.Event()

    async def after(count: int) -> None:
        if count == 2:
            await held.wait()

    router = await start_router(await start_worker(says(REPLY, after=after)))
    async with router.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        await anext(response.aiter_lines())

    async def counted() -> bool:
        return ("request_success_total", "abort") in await _values(router)

    await eventually(counted)
    values = await _values(router)
    assert values["request_success_total", "abort"] == 1
    assert values["request_generation_tokens_sum", ""] == values["generation_tokens_total", ""] == 2
    held.set()


async def test_gauges_describe_the_combined_workers(
    router: Router, worker: FakeWorker, start_worker: StartWorker
) -> None:
    prefill = await start_worker(worker_id="prefill-0", kind="prefill")
    await router.knows(prefill)
    prefill.send(pb.WorkerMessage(load=pb.Load(state=pb.STATE_READY, running=9, waiting=9, free_pages=1000)))
    load = pb.Load(state=pb.STATE_READY, running=3, waiting=2, free_pages=20, cached_pages=30, used_pages=40)
    load.reserved_pages = 10
    worker.send(pb.WorkerMessage(load=load))

    async def told() -> bool:
        return (await _values(router))["num_requests_running", ""] == 3

    await eventually(told)
    values = await _values(router)
    assert values["num_requests_waiting", ""] == 2
    assert values["kv_cache_usage_perc", ""] == 0.5
    text = (await router.http.get("/metrics")).text
    assert 'vllm:cache_config_info{block_size="16",model_name="small-model",num_gpu_blocks="100"} 1.0' in text


async def test_without_workers_the_gauges_are_0(start_router: StartRouter) -> None:
    values = await _values(await start_router())
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [values[name, ""] for name in names] == [0, 0, 0]


async def test_transfers_of_a_worker_are_histograms(router: Router, worker: FakeWorker) -> None:
    sizes, durations, speeds = Buckets(TRANSFER_BYTES), Buckets(TRANSFER_S), Buckets(TRANSFER_BYTES_PER_S)
    for size in (1 << 20, 1 << 40):
        sizes.add(size)
    durations.add(0.002)
    load = pb.Load(state=pb.STATE_READY, free_pages=100)
    for name, buckets in (("bytes", sizes), ("seconds", durations), ("bytes_per_second", speeds)):
        getattr(load.transfers, name).CopyFrom(pb.Histogram(counts=buckets.counts, sum=buckets.sum))
    worker.send(pb.WorkerMessage(load=load))
    labels = 'role="combined",router="router-a",worker="combined-0"'

    async def shown() -> bool:
        return "cpd_worker_transfer_bytes_count{" in (await router.http.get("/metrics")).text

    await eventually(shown)
    lines = (await router.http.get("/metrics")).text.splitlines()
    assert f'cpd_worker_transfer_bytes_bucket{{le="1048576.0",{labels}}} 1.0' in lines
    assert f'cpd_worker_transfer_bytes_bucket{{le="+Inf",{labels}}} 2.0' in lines
    assert f"cpd_worker_transfer_bytes_count{{{labels}}} 2.0" in lines
    assert f'cpd_worker_transfer_seconds_bucket{{le="0.001",{labels}}} 0.0' in lines
    assert f'cpd_worker_transfer_seconds_bucket{{le="0.003",{labels}}} 1.0' in lines


async def test_transfers_with_other_buckets_are_left_out(router: Router, worker: FakeWorker) -> None:
    load = pb.Load(state=pb.STATE_READY, free_pages=99)
    load.transfers.bytes.CopyFrom(pb.Histogram(counts=[1, 2], sum=3))
    worker.send(pb.WorkerMessage(load=load))

    async def known() -> bool:
        return 'state="free",worker="combined-0"} 99.0' in (await router.http.get("/metrics")).text

    await eventually(known)
    assert "cpd_worker_transfer_bytes_count{" not in (await router.http.get("/metrics")).text


async def test_the_process_is_measured_as_others_are(router: Router) -> None:
    text = (await router.http.get("/metrics")).text
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert f"\nprocess_{name} " in text
