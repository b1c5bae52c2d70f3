import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from bench.errors import BenchError
from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer

PATIENT = httpx.Timeout(30)


@pytest.fixture(scope="module")
def mock() -> Iterator[MockServer]:
    with MockServer(Behaviour(ttft_ms=5, itl_ms=2, keep_sends=True)) as server:
        yield server


def ask(server: MockServer, prompt: str = "one two", **fields: Any) -> httpx.Response:
    body = {"model": "mock", "messages": [{"role": "user", "content": prompt}], "max_tokens": 3, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENT)


def sends(mock: MockServer) -> dict[str, list[float]]:
    """The times at which the chunks were sent, by prompt."""
    times: dict[str, list[float]] = httpx.get(f"{mock.url}/sends", timeout=PATIENT).json()
    assert all(sorted(stamps) == stamps for stamps in times.values())
    return {prompt: sent for prompt, (_read, *sent) in times.items()}


def listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/v1/models", timeout=PATIENT)
    except httpx.TransportError:
        return False
    return True


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def test_it_lists_its_model(mock: MockServer) -> None:
    assert [model["id"] for model in httpx.get(f"{mock.url}/v1/models", timeout=PATIENT).json()["data"]] == ["mock"]


def test_nothing_is_sent_early(mock: MockServer) -> None:
    before = time.perf_counter()
    ask(mock, "not early", stream=True, max_tokens=20)
    for number, sent in enumerate(sends(mock)["not early"]):
        assert sent >= before + 0.005 + number * 0.002


def test_a_request_overrides_how_it_is_answered(mock: MockServer) -> None:
    assert ask(mock, mock={"fault": "status", "status": 503}).status_code == 503
    assert ask(mock).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"mock": {"no_such_field": 1}}, {"mock": {"ttft_ms": -1}}, {"mock": {"stall_s": 1}}, {"messages": 1}]
)
def test_a_malformed_request_is_refused(mock: MockServer, fields: dict[str, Any]) -> None:
    assert ask(mock, **fields).status_code == 400


def test_another_model_or_path_is_not_found(mock: MockServer) -> None:
    assert ask(mock, model="another").status_code == 404
    assert httpx.get(f"{mock.url}/v1/nothing", timeout=PATIENT).status_code == 404


def test_a_connection_serves_one_request_after_another(mock: MockServer) -> None:
    with httpx.Client(base_url=mock.url, timeout=PATIENT) as client:
        for _ in range(3):
            assert client.get("/v1/models").status_code == 200


def test_a_client_that_hangs_up_affects_no_other(mock: MockServer) -> None:
    body = {"model": "mock", "prompt": "gone", "max_tokens": 100_000, "stream": True}
    with httpx.stream("POST", f"{mock.url}/v1/completions", json=body, timeout=PATIENT) as response:
        next(response.iter_bytes())
    assert ask(mock).status_code == 200


def test_a_client_that_reads_slowly_gets_everything(mock: MockServer) -> None:
    body = {"model": "mock", "prompt": "slow", "max_tokens": 30_000, "stream": True, "mock": {"itl_ms": 0}}
    with httpx.stream("POST", f"{mock.url}/v1/completions", json=body, timeout=PATIENT) as response:
        wait_for(lambda: len(sends(mock)["slow"]) == 30_000, "all is sent, though nothing is read")
        lines = list(response.iter_lines())
    assert sum('"text":" word"' in line for line in lines) == 30_000
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_wrong_key_is_refused() -> None:
    with MockServer(Behaviour(api_key="secret", ttft_ms=0, itl_ms=0)) as mock:
        assert httpx.get(f"{mock.url}/v1/models", timeout=PATIENT).status_code == 401
        assert (
            httpx.get(f"{mock.url}/v1/models", headers={"Authorization": "Bearer secret"}, timeout=PATIENT).status_code
            == 200
        )


def test_a_stall_delays_all_answers() -> None:
    with MockServer(Behaviour(ttft_ms=20, itl_ms=5, stall_at_s=0.028, stall_s=2.0, keep_sends=True)) as mock:
        before = time.perf_counter()
        ask(mock, stream=True, max_tokens=5)
        sent = sends(mock)["one two"]
    for time_s, at_ms in zip(sent, (20, 25, 2030, 2035, 2040), strict=True):
        assert time_s >= before + at_ms / 1e3
    assert sent[2] - sent[0] >= 1.0


def test_a_prefill_holds_up_everybody_for_as_long_as_its_prompt_takes() -> None:
    with MockServer(Behaviour(ttft_ms=0, itl_ms=1, prefill_us_per_token=1000, keep_sends=True)) as mock:
        before = time.perf_counter()
        ask(mock, "word " * 200, stream=True)
        assert min(next(iter(sends(mock).values()))) >= before + 0.2


def test_one_that_cannot_start_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match="did not start"), MockServer(Behaviour.model_construct(ttft_ms=-1)):
        pass
    assert "ttft-ms" in capfd.readouterr().err


def test_it_ends_with_the_process_that_started_it() -> None:
    code = """
import time
from bench.mock.process import MockServer
with MockServer() as mock:
    print(mock.url, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        url = parent.stdout.readline().strip()
        assert httpx.get(f"{url}/v1/models", timeout=PATIENT).status_code == 200
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
    wait_for(lambda: not listens(url), "it has ended")
