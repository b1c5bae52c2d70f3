import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.record import Failure
from tests.bench.client.scripted import (
    ASK,
    DONE,
    EVENT_STREAM,
    HELLO,
    Reader,
    Writer,
    always,
    asking,
    chunked,
    delta,
    new_record,
    once,
    request,
    serving,
)
from tests.waiting import eventually

JSON = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + b'{"id": 1}'


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def test_a_connection_serves_one_request_after_another() -> None:
    served: list[int] = []

    async def script(reader: Reader, writer: Writer) -> None:
        served.append(0)
        while True:
            await request(reader)
            served[-1] += 1
            writer.write(chunked())

    async with serving(script) as url, asking(url) as client:
        for _ in range(5):
            assert await client.stream(new_record(), ASK) == "Hello"
        assert served == [5]
        await asyncio.gather(*(client.stream(new_record(), ASK) for _ in range(4)))
        assert len(served) == 4


async def test_the_request_is_what_a_server_expects() -> None:
    heads: list[bytes] = []

    async def script(reader: Reader, writer: Writer) -> None:
        head, _ = await request(reader)
        heads.append(head)
        writer.write(chunked())

    async with serving(script) as url, asking(f"{url}/deep", "completions", api_key="sk-1") as client:
        await client.stream(new_record(), ASK)
    first, *rest = heads[0].decode().split("\r\n")
    assert first == "POST /deep/v1/completions HTTP/1.1"
    assert f"Host: {url.removeprefix('http://')}" in rest
    assert "Authorization: Bearer sk-1" in rest
    assert "Content-Type: application/json" in rest


@pytest.mark.parametrize("response", [chunked(), b"HTTP/1.1 204 No Content\r\n\r\n"])
async def test_a_connection_that_was_closed_while_idle_costs_no_request(response: bytes) -> None:
    connections = 0

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await request(reader)
        if connections == 1:
            writer.write(response)
            await request(reader)  # arrives just after the server has decided to close
        else:
            writer.write(chunked())

    record = new_record()
    async with serving(script) as url, asking(url) as client:
        await client.stream(new_record(), ASK)
        assert await client.stream(record, ASK) == "Hello"
    assert record.error == ""
    assert connections == 2


async def test_a_server_that_never_answers_is_asked_again_only_once() -> None:
    requests = 0

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal requests
        await request(reader)
        requests += 1
        if requests == 1:
            writer.write(chunked())
            await request(reader)
            requests += 1

    record = new_record()
    async with serving(script) as url, asking(url) as client:
        await client.stream(new_record(), ASK)
        await client.stream(record, ASK)
    assert record.error == Failure.DISCONNECTED
    assert requests == 3


async def test_an_answer_that_breaks_off_is_not_asked_for_again() -> None:
    requests = 0

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal requests
        for response in (chunked(), chunked()[:-60]):
            await request(reader)
            requests += 1
            writer.write(response)

    record = new_record()
    async with serving(script) as url, asking(url) as client:
        await client.stream(new_record(), ASK)
        await client.stream(record, ASK)
    assert record.error == Failure.DISCONNECTED
    assert requests == 2


async def test_nobody_listens(closed_port: int) -> None:
    record = new_record()
    async with asking(f"http://127.0.0.1:{closed_port}") as client:
        assert await client.stream(record, ASK) == ""
        with pytest.raises(BenchError, match="Is the server running"):
            await client.get_json("/v1/models")
    assert record.error == Failure.CONNECT
    assert str(closed_port) in record.detail
    assert record.ended_s >= record.sent_s > 0


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no-such-host..invalid", "no-such-host" * 9])
async def test_a_host_that_does_not_exist(host: str) -> None:
    record = new_record()
    async with asking(f"http://{host}") as client:
        await client.stream(record, ASK)
    assert record.error == Failure.CONNECT
    assert "no-such-host" in record.detail


async def test_a_connection_that_is_never_made() -> None:
    record = new_record()
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]  # they fill the backlog of a server that never accepts
        for other in waiting:
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        async with asking(f"http://127.0.0.1:{full.getsockname()[1]}", timeout_s=0.1) as client:
            await client.stream(record, ASK)
        for other in waiting:
            other.close()
    assert record.error == Failure.CONNECT
    assert "0.1 s" in record.detail


@pytest.mark.parametrize("start", [b"", EVENT_STREAM + b"\r\n" + HELLO[0]])
async def test_cancelling_aborts_the_request_and_closes_the_connection(start: bytes) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(start)
        asked.set()
        await reader.read()
        closed.set()

    record = new_record()
    async with serving(script) as url, asking(url) as client:
        task = asyncio.create_task(client.stream(record, ASK))
        await asked.wait()
        await eventually(lambda: bool(record.content_s) or not start)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 10)
    assert record.error == Failure.ABORTED
    assert record.ended_s > 0


async def test_cancelling_while_connecting_aborts_the_request() -> None:
    record = new_record()
    async with serving(always(chunked())) as url, asking(url) as client:
        task = asyncio.create_task(client.stream(record, ASK))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert record.error == Failure.ABORTED


@pytest.mark.parametrize(
    ("answer", "error", "output_tokens"), [(HELLO, "", 2), ((delta("stop"), DONE), Failure.ABORTED, None)]
)
async def test_cancelling_after_the_end_leaves_the_record_complete_if_it_has_text(
    answer: Sequence[bytes], error: str, output_tokens: int | None
) -> None:
    finished = asyncio.Event()

    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(chunked(answer)[: -len(b"0\r\n\r\n")])
        finished.set()
        await reader.read()

    record = new_record()
    async with serving(script) as url, asking(url) as client:
        task = asyncio.create_task(client.stream(record, ASK))
        await finished.wait()
        await eventually(lambda: record.finish_reason != "")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (record.error, record.output_tokens) == (error, output_tokens)


async def test_output_is_counted_where_the_server_does_not() -> None:
    record = new_record()
    pieces = (*HELLO[:3], HELLO[4])
    async with serving(once(chunked(pieces))) as url, asking(url, count=len) as client:
        await client.stream(record, ASK)
    assert record.output_tokens == 5


async def test_a_document() -> None:
    async with serving(always(JSON)) as url, asking(url) as client:
        assert await client.get_json("/v1/models") == (200, {"id": 1})


async def test_a_document_that_is_not_there() -> None:
    response = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nNo"
    async with serving(always(response)) as url, asking(url) as client:
        assert await client.get_json("/cluster") == (404, "No")


async def test_a_document_that_is_no_json() -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
    async with serving(always(response)) as url, asking(url) as client:
        with pytest.raises(BenchError, match="<html>"):
            await client.get_json("/v1/models")


async def test_ipv6() -> None:
    async with serving(always(chunked()), host="::1") as url, asking(url) as client:
        assert await client.stream(new_record(), ASK) == "Hello"


async def test_a_name_whose_first_address_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(always(chunked())) as url:
        port = int(url.rpartition(":")[2])

        async def getaddrinfo(*args: object, **options: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.9", "127.0.0.1")]

        async with asking(f"http://two.example:{port}") as client:
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
            assert await client.stream(new_record(), ASK) == "Hello"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, pem = folder / "key.pem", folder / "both.pem"
    command: list[str | Path] = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        pem,
        "-days",
        "2",
    ]
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    pem.write_bytes(key.read_bytes() + pem.read_bytes())
    return pem


async def test_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with serving(always(chunked()), tls=tls) as url:
        async with asking(url) as client:
            record = new_record()
            await client.stream(record, ASK)
            assert record.error == Failure.CONNECT
            assert "certificate" in record.detail
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with asking(url) as client:
            assert [await client.stream(new_record(), ASK) for _ in range(2)] == ["Hello", "Hello"]


async def test_https_of_a_server_without_tls() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    record = new_record()
    async with serving(script) as url, asking(url.replace("http", "https")) as client:
        await client.stream(record, ASK)
    assert record.error == Failure.CONNECT
    assert "SSL" in record.detail
