"""The router as a process."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from cpd.common.errors import ConfigError
from cpd.common.lifecycle import Lifecycle
from cpd.common.process import EXIT_DRAINED, EXIT_SUPERSEDED
from cpd.common.settings import RouterSettings
from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from router.listener import listen
from router.server import GRACE_S, SHUTDOWN_S, serve
from tests.certificates import certificate_files
from tests.router.conftest import Says, StartWorker, eventually
from tests.router.fake_worker import outputs
from tests.secret import SECRET, secret_file

START_S = 60.0

StartProcess = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start_process(redis_url: str, model_dir: Path, cluster: str) -> AsyncIterator[StartProcess]:
    """`await start_process("--flag", "value", ...)`: python -m router."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*flags: str) -> asyncio.subprocess.Process:
            common = ("--model", str(model_dir), "--cluster", cluster, "--redis-url", redis_url)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router", *common, *flags),
                env=os.environ | {"CPD_SECRET_FILE": str(secret_file())},
                stderr=asyncio.subprocess.PIPE,
            )
            stack.push_async_callback(_end, process)
            return process

        yield start


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


@pytest.fixture
def port() -> Iterator[int]:
    """A port for several routers. It is bound, as theirs are, so that no other process gets it."""
    with listen("127.0.0.1", 0) as held:
        number: int = held.getsockname()[1]
        yield number


async def _is_ready(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=START_S) as client:
            return (await client.get(f"{url}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def test_with_a_certificate_it_serves_https(
    start_process: StartProcess, start_worker: StartWorker, says: Says, port: int, tmp_path: Path
) -> None:
    cert, key = certificate_files(tmp_path)
    await start_worker(says("the fox"))
    await start_process("--port", str(port), "--tls-cert", str(cert), "--tls-key", str(key))
    trusting = ssl.create_default_context(cafile=str(cert))
    async with httpx.AsyncClient(base_url=f"https://localhost:{port}", verify=trusting, timeout=START_S) as client:

        async def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await client.get("/readyz")).status_code == 200
            return False

        await eventually(is_ready, START_S)
        body = {"model": "small-model", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "the fox"
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        long = await client.post("/v1/chat/completions", json={**body, "user": "x" * 1_000_000})
        assert long.status_code == 200
    async with httpx.AsyncClient(timeout=START_S) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://127.0.0.1:{port}/readyz")


async def test_without_a_secret_it_listens_on_loopback_only(model_dir: Path, redis_url: str) -> None:
    settings = RouterSettings(model=str(model_dir), redis_url=redis_url, host="0.0.0.0")
    with listen(settings.host, 0) as listener, pytest.raises(ConfigError, match="pass --secret-file FILE everywhere"):
        await serve(settings, "r", listener, Lifecycle(30.0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_and_shuts_down_on_a_signal(
    start_process: StartProcess, start_worker: StartWorker, says: Says, number: signal.Signals, cluster: str, port: int
) -> None:
    await start_worker(says("the fox"))
    url = f"http://127.0.0.1:{port}"
    process = await start_process("--port", str(port), "--router-id", "router-x")
    await eventually(lambda: _is_ready(url), START_S)
    body = {"model": "small-model", "messages": [{"role": "user", "content": "Hi"}]}
    async with httpx.AsyncClient(base_url=url, timeout=START_S) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.json()["choices"][0]["message"]["content"] == "the fox"

        async def is_listed() -> bool:
            routers = (await client.get("/cluster")).json()["routers"]
            return [(router["id"], router["address"]) for router in routers] == [("router-x", f"127.0.0.1:{port}")]

        await eventually(is_listed)
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_sighup_makes_it_read_its_keys_again(start_process: StartProcess, tmp_path: Path, port: int) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[{key: old}]")
    process = await start_process("--port", str(port), "--api-key-file", str(file), "--log-level", "info")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as client:

        async def answers() -> bool:
            try:
                return (await client.get("/readyz")).status_code == 503
            except httpx.TransportError:
                return False

        await eventually(answers, START_S)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        while "the API keys were read again" not in (line := (await process.stderr.readline()).decode()):
            assert line, "it ended"


async def test_a_router_that_gets_sigterm_serves_what_it_has(
    start_process: StartProcess, start_worker: StartWorker, says: Says, tokenizer: Tokenizer, port: int
) -> None:
    worker = await start_worker(None)
    end = asyncio.Event()

    async def slow(submit: pb.Submit) -> AsyncIterator[pb.Output | pb.Refusal]:
        first, *others = outputs(submit, [tokenizer.encode("the fox").ids])
        yield first
        await end.wait()
        for output in others:
            yield output

    url = f"http://127.0.0.1:{port}"
    process = await start_process("--port", str(port))
    await eventually(lambda: _is_ready(url), START_S)
    # as many tokens as there are
    body = {"model": "small-model", "prompt": "x", "max_tokens": len(tokenizer.encode("the fox").ids)}
    async with httpx.AsyncClient(base_url=url, timeout=START_S) as client:
        worker.script = slow
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.terminate()

            async def drains() -> bool:
                answer = await client.get("/readyz")
                return answer.status_code == 503 and answer.headers.get("connection") == "close"

            await eventually(drains, START_S)
            worker.script = says("the fox")
            answer = await client.post("/v1/completions", json=body)  # of a client that has not heard of it
            assert answer.json()["choices"][0]["text"] == "the fox"
            with pytest.raises(TimeoutError):  # a router that stops would cut its streams after GRACE_S
                await asyncio.wait_for(process.wait(), GRACE_S + SHUTDOWN_S)
            end.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert await asyncio.wait_for(process.wait(), START_S) == 0


async def test_only_an_operator_drains_a_router(
    start_process: StartProcess, start_worker: StartWorker, says: Says, port: int
) -> None:
    await start_worker(says("the fox"))
    url = f"http://127.0.0.1:{port}"
    process = await start_process("--port", str(port))
    await eventually(lambda: _is_ready(url), START_S)
    async with httpx.AsyncClient(timeout=START_S) as client:

        async def routers() -> list[dict[str, str]]:
            return list((await client.get(f"{url}/cluster")).json()["routers"])

        async def is_known() -> bool:
            return bool(await routers())

        await eventually(is_known)
        (router,) = await routers()
        assert (await client.post(f"{url}/drain")).status_code == 404
        drain = f"http://{router['admin']}/drain"
        assert (await client.post(drain)).status_code == 401
        for timeout_s in ("-1", "nan", "x"):
            refused = await client.post(drain, params={"timeout_s": timeout_s})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout_s")
        headers = {"authorization": f"Bearer {ClusterSecret(SECRET).admin_key}"}
        assert (await client.post(drain, headers=headers)).json() == {"status": "draining"}
    assert await asyncio.wait_for(process.wait(), START_S) == EXIT_DRAINED


@pytest.mark.parametrize(("stream", "drain_s"), [(False, "30"), (True, "30"), (True, "0")])
async def test_a_running_request_fails_at_a_second_signal_or_when_the_time_is_over(
    start_process: StartProcess, start_worker: StartWorker, stream: bool, drain_s: str, port: int
) -> None:
    worker = await start_worker()
    url = f"http://127.0.0.1:{port}"
    process = await start_process("--port", str(port), "--drain-s", drain_s)
    await eventually(lambda: _is_ready(url), START_S)
    body = {"model": "small-model", "prompt": "x", "stream": stream}
    async with httpx.AsyncClient(base_url=url, timeout=START_S) as client:
        call = asyncio.create_task(client.post("/v1/completions", json=body))

        async def submitted() -> bool:
            return bool(worker.submits)

        await eventually(submitted)
        process.terminate()

        async def drains() -> bool:
            return not await _is_ready(url)

        if drain_s != "0":
            await eventually(drains, START_S)
            process.terminate()
        response = await call
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_routers_share_a_port(
    start_process: StartProcess, start_worker: StartWorker, says: Says, port: int
) -> None:
    await start_worker(says("the fox"))
    url = f"http://127.0.0.1:{port}"
    processes = [await start_process("--port", str(port), "--router-id", f"router-{name}") for name in "ab"]

    async def both() -> bool:
        if not await _is_ready(url):
            return False
        async with httpx.AsyncClient(base_url=url, timeout=START_S) as client:
            return len((await client.get("/cluster")).json()["routers"]) == 2

    await eventually(both, START_S)
    processes[0].kill()
    await processes[0].wait()
    for _ in range(5):
        async with httpx.AsyncClient(
            base_url=url, timeout=START_S
        ) as client:  # a new connection each: the survivor takes them all
            answer = await client.post("/v1/completions", json={"model": "small-model", "prompt": "x"})
            assert answer.json()["choices"][0]["text"] == "the fox"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/nowhere"), "the model directory /nowhere does not exist"),
        (("--redis-url", ""), "redis-url is needed"),
        (("--host", "203.0.113.7"), "can't listen on 203.0.113.7"),
        (("--host", "no.such.host.invalid"), "can't listen on no.such.host.invalid"),
    ],
)
async def test_an_error_at_startup_is_one_sentence(
    start_process: StartProcess, flags: tuple[str, str], message: str
) -> None:
    process = await start_process("--port", "0", *flags)
    started = time.monotonic()
    _, stderr = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 1, time.monotonic() - started
    last = stderr.decode().strip().splitlines()
    assert len(last) == 1
    assert last[0].startswith("error: ")
    assert message in last[0]


def test_a_port_of_another_program_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="can't listen"):
            listen("127.0.0.1", other.getsockname()[1])


async def test_a_router_ends_when_a_newer_one_has_its_id(
    start_process: StartProcess, start_worker: StartWorker, says: Says, port: int
) -> None:
    await start_worker(says("the fox"))
    older = await start_process("--port", str(port), "--router-id", "router-x")
    await eventually(lambda: _is_ready(f"http://127.0.0.1:{port}"), START_S)
    await start_process("--port", "0", "--router-id", "router-x")
    assert older.stderr is not None
    log = (await asyncio.wait_for(older.stderr.read(), START_S)).decode()
    assert await older.wait() == EXIT_SUPERSEDED
    [line] = [line for line in log.splitlines() if "a newer process has the id router-x" in line]
    assert '"kind":"router"' in line
