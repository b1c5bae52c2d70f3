"""Everything that can happen on one connection, seen in the client's records."""

import asyncio
import socket

import pytest

from bench.client.client import Client
from bench.record import Failure, Record
from bench.workloads.base import Message
from tests.bench.client.scripted import (
    ASK,
    DONE,
    EVENT_STREAM,
    HELLO,
    Reader,
    Script,
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
from tests.virtual_time import run_in_virtual_time, virtual_perf_counter

BODY = b"".join(HELLO)


async def ask(script: Script, timeout_s: float = 20.0) -> tuple[Record, str]:
    record = new_record()
    async with serving(script) as url, asking(url, timeout_s=timeout_s) as client:
        text = await client.stream(record, ASK)
    return record, text


def sized(body: bytes, status: str = "200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status.encode(), headers, len(body), body)


@pytest.mark.parametrize(
    "response",
    [
        chunked(),
        chunked((BODY,)),
        sized(BODY),
        EVENT_STREAM + b"\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        EVENT_STREAM + b"Connection: close\r\n\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(),
        chunked().replace(b"\r\n\r\n", b"\r\nTrailer: x\r\n\r\n", 1).removesuffix(b"\r\n") + b"x: 1\r\n\r\n",
        chunked((*HELLO, b"nonsense\n\n")),
        chunked((*[b": wait\n\n"] * 50_000, *HELLO)),
    ],
    ids=[
        "chunked",
        "one-chunk",
        "content-length",
        "close",
        "http-1.0",
        "asked-to-close",
        "continue",
        "trailer",
        "more",
        "long",
    ],
)
async def test_every_form_of_a_body(response: bytes) -> None:
    record, text = await ask(once(response))
    assert (record.error, record.detail, text) == ("", "", "Hello")
    assert len(record.content_s) == 2


async def test_a_response_in_single_bytes() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        for byte in chunked():
            writer.write(bytes((byte,)))
            await asyncio.sleep(0)

    record, text = await ask(script)
    assert (record.error, text) == ("", "Hello")


async def test_times_are_those_of_the_chunks() -> None:
    record = new_record()
    seen = asyncio.Semaphore(0)

    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(EVENT_STREAM + b"\r\n" + delta(role="assistant"))
        for piece in HELLO[:2]:
            await seen.acquire()
            writer.write(piece)
        await seen.acquire()
        writer.write(b"".join(HELLO[2:]))

    async with serving(script) as url, asking(url) as client:
        running = asyncio.create_task(client.stream(record, ASK))
        for chunks in range(3):
            while len(record.content_s) < chunks:  # noqa: ASYNC110 - the record tells nobody
                await asyncio.sleep(0.001)
            seen.release()
        assert record.ended_s == 0
        await running
    assert record.sent_s < record.content_s[0] < record.content_s[1] <= record.ended_s
    assert record.answer_s == record.content_s[0]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"", Failure.DISCONNECTED),
        (b"HTTP/1.1 200 OK\r\n", Failure.DISCONNECTED),
        (chunked()[:-60], Failure.DISCONNECTED),
        (sized(BODY)[:-60], Failure.DISCONNECTED),
        (EVENT_STREAM + b"\r\n" + BODY[:-30], Failure.INCOMPLETE),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Failure.MALFORMED),
        (b"HTTP/1.1 abc\r\n\r\n", Failure.MALFORMED),
        (EVENT_STREAM + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", Failure.MALFORMED),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", Failure.MALFORMED),
        (sized(b"{}", "400 Bad Request"), "http_400"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "http_204"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<h1>No</h1>", "http_502"),
    ],
)
async def test_broken_responses(response: bytes, error: str) -> None:
    record, _ = await ask(once(response))
    assert record.error == error
    assert record.ended_s >= record.sent_s


async def test_a_stream_that_is_complete_needs_no_end_of_its_body() -> None:
    record, text = await ask(once(chunked()[: -len(b"0\r\n\r\n")]))
    assert (record.error, text) == ("", "Hello")


async def test_a_body_that_goes_on_after_done_is_not_waited_for() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(chunked()[: -len(b"0\r\n\r\n")])
        await reader.read()

    record, text = await ask(script)
    assert (record.error, text) == ("", "Hello")


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", Failure.MALFORMED),
        (EVENT_STREAM + b"Transfer-Encoding: chunked\r\n\r\n5;", Failure.MALFORMED),
        (EVENT_STREAM + b"\r\n", Failure.MALFORMED),
        (b"HTTP/1.1 500 Oops\r\n\r\n", "http_500"),
    ],
    ids=["header", "chunk-extension", "event", "error-page"],
)
async def test_garbage_without_end(start: bytes, error: str) -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(start)
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    assert (await ask(script))[0].error == error


@pytest.mark.parametrize("start", [b"", EVENT_STREAM, EVENT_STREAM + b"\r\n" + HELLO[0]])
async def test_silence_is_a_timeout(start: bytes) -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(start)
        await reader.read()

    record, _ = await ask(script, timeout_s=0.5)
    assert record.error == Failure.TIMEOUT
    assert "for 0.5 s" in record.detail


async def test_a_server_that_only_keeps_the_connection_alive_times_out() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(EVENT_STREAM + b"\r\n" + HELLO[0])
        while not writer.is_closing():
            writer.write(b": wait\n\n")
            await asyncio.sleep(0.01)

    record, _ = await ask(script, timeout_s=0.5)
    assert record.error == Failure.TIMEOUT


def test_a_slow_stream_is_no_timeout() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(EVENT_STREAM + b"\r\n")
        for _ in range(35):
            writer.write(HELLO[0])
            await asyncio.sleep(0.02)
        writer.write(BODY)

    async def main() -> Record:
        with virtual_perf_counter():
            return (await ask(script, timeout_s=0.5))[0]

    record, took_ms = run_in_virtual_time(main())
    assert record.error == ""
    assert took_ms > 500


async def test_an_error_event_ends_the_request_and_the_connection() -> None:
    closed = asyncio.Event()

    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(EVENT_STREAM + b'\r\ndata: {"error": {"message": "Lost."}}\n\n')
        await reader.read()
        closed.set()

    record = new_record()
    async with serving(script) as url, asking(url) as client:
        await client.stream(record, ASK)
        await asyncio.wait_for(closed.wait(), 10)
    assert (record.error, record.detail) == (Failure.STREAM_ERROR, "Lost.")


async def test_a_large_prompt_is_sent_whole() -> None:
    got = b""

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal got
        _, got = await request(reader)
        writer.write(chunked())

    record = new_record()
    prompt = "word " * 2_000_000
    async with serving(script) as url, asking(url, "completions") as client:
        await client.stream(record, (Message("user", prompt),))
    assert record.error == ""
    assert prompt.encode() in got


async def test_an_answer_before_the_whole_prompt_was_read() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized(b'{"error": "Too long."}', "413 Content Too Large", b"Connection: close\r\n"))

    record = new_record()
    async with serving(script) as url, asking(url, "completions") as client:
        await client.stream(record, (Message("user", "word " * 4_000_000),))
    assert (record.error, record.detail) == ("http_413", "Too long.")


@pytest.mark.parametrize(
    "response",
    [
        sized(b"{}", "413 Content Too Large"),
        sized(b"{}", "413 Content Too Large", b"Connection: close\r\n"),
    ],
    ids=["the-prompt-is-still-being-sent", "the-server-says-so"],
)
async def test_a_connection_that_cannot_be_used_again_is_not(response: bytes) -> None:
    connections = 0

    async def script(reader: Reader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await asyncio.sleep(60)  # stops reading but does not close

    long = (Message("user", "word " * 4_000_000),)
    async with serving(script) as url, asking(url) as client:
        for prompt in (ASK if b"close" in response else long, ASK):
            record = new_record()
            await client.stream(record, prompt)
            assert record.error == "http_413"
    assert connections == 2


async def test_nagle_is_off() -> None:
    async with serving(always(chunked())) as url, asking(url) as client:
        await client.stream(new_record(), ASK)
        (connection,) = client._connections
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_server_that_speaks_unasked_is_not_listened_to() -> None:
    async def script(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(chunked() + sized(b"surprise"))
        await reader.read()

    async def twice(client: Client) -> list[str]:
        return [await client.stream(new_record(), ASK) for _ in range(2)]

    async with serving(script) as url, asking(url) as client:
        assert await twice(client) == ["Hello", "Hello"]


async def test_done_counts_when_it_came() -> None:
    record, _ = await ask(once(EVENT_STREAM + b"\r\n" + b"".join(HELLO[:4]) + DONE.strip()))
    assert record.error == ""
