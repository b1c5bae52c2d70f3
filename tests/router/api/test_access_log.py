import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cpd.common.logs import TextFormatter
from cpd.rpc import cpd_pb2 as pb
from tests.router.conftest import Says, StartRouter, StartWorker, eventually
from tests.router.fake_worker import Answer

PROMPT = "the quick brown fox"
BODY: dict[str, Any] = {"model": "small-model", "prompt": PROMPT, "max_tokens": 50}


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def call(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The fields of the only access line, once it is there."""

    async def there() -> bool:
        return bool(lines())

    def lines() -> list[dict[str, Any]]:
        return [record.__dict__["fields"] for record in caplog.records if record.name == "router.access"]

    await eventually(there)
    [line] = lines()
    return line


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_one_line_without_its_texts(
    start_router: StartRouter, start_worker: StartWorker, says: Says, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await start_worker(worker_id="prefill-3", kind="prefill")
    router = await start_router(await start_worker(says("lazy dog", prefill_worker="prefill-3")), prefill)
    await router.http.post("/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": "mine-1"})
    line = await call(caplog)
    assert line.pop("ttft_ms") >= 0
    assert line.pop("duration_ms") >= 0
    assert line.pop("prompt_tokens") > 0
    assert line.pop("output_tokens") > 0
    assert line.pop("cached_tokens") >= 0
    assert line == {
        "path": "/v1/completions",
        "request_id": "mine-1",
        "tenant": "",
        "model": "small-model",
        "outcome": "completed",
        "status": 200,
        "route": "remote",
        "decode_worker": "combined-0",
        "prefill_worker": "prefill-3",
        "queue_ms": 0.0,
    }
    log = "\n".join(TextFormatter("router").format(record) for record in caplog.records)
    assert "request_id=mine-1" in log
    assert "fox" not in log
    assert "dog" not in log


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        ({"json": BODY | {"model": "other"}}, 404, "model_not_found"),
        ({"json": BODY | {"max_tokens": 100_000}}, 400, "context_length_exceeded"),
        ({"json": BODY, "headers": {"authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
        ({"content": "{}"}, 415, "unsupported_media_type"),
    ],
)
async def test_a_refused_call_says_why(
    start_router: StartRouter,
    start_worker: StartWorker,
    sent: dict[str, Any],
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = await start_router(await start_worker(), api_key=["one"])
    await router.http.post("/v1/completions", **sent)
    line = await call(caplog)
    assert (line["outcome"], line["status"], line["code"]) == ("error", status, code)
    assert "decode_worker" not in line


async def test_a_stream_that_breaks_is_an_error(
    start_router: StartRouter, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    seen = asyncio.Event()

    async def script(submit: pb.Submit) -> AsyncIterator[Answer]:
        yield pb.Output(token_ids=[5])
        await seen.wait()
        yield pb.Refusal(kind=pb.Refusal.KIND_FAILED, message="broken")

    router = await start_router(await start_worker(script))
    async with router.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        seen.set()  # the head of the response is here
        events = (await response.aread()).decode().split("\n\n")
    assert "internal_error" in events[-2]
    assert "data: [DONE]" not in events
    line = await call(caplog)
    assert (line["outcome"], line["status"], line["code"]) == ("error", 200, "internal_error")
    assert line["output_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up(
    start_router: StartRouter, start_worker: StartWorker, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await start_worker()  # never answers
    router = await start_router(worker)
    async with httpx.AsyncClient(base_url=router.url) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))

        async def submitted() -> bool:
            return bool(worker.submits)

        await eventually(submitted)
        waiting.cancel()
        await asyncio.wait([waiting])
    line = await call(caplog)
    assert line["outcome"] == "client_gone"
    assert line["output_tokens"] == 0


async def test_probes_and_metrics_are_no_calls(
    start_router: StartRouter, start_worker: StartWorker, says: Says, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(await start_worker(says("fox")))
    for path in ("/livez", "/metrics", "/v1/models", "/nowhere"):
        await router.http.get(path)
    await router.http.post("/v1/completions", json=BODY)
    assert (await call(caplog))["path"] == "/v1/completions"
