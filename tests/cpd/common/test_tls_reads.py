"""What a protocol sees of a TLS connection does not depend on how it is read."""

import asyncio
from typing import Any

import pytest
import uvloop

from cpd.common.tls import client_context, make_certificate
from cpd.common.tls_reads import cheap_reads
from tests.waiting import eventually

MANY = bytes(range(256)) * 40_000  # more than all buffers on the way


class Recorder(asyncio.Protocol):
    def __init__(self, *, replies: bool = False) -> None:
        self.calls: list[str] = []
        self.data = bytearray()
        self.lost = asyncio.get_running_loop().create_future()
        self._replies = replies

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport  # uvloop's class is not a subclass
        self.calls.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self._replies and len(self.data) == len(MANY):
            self.transport.write(self.data)
            self.transport.close()

    def eof_received(self) -> None:
        self.calls.append("eof")

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append(f"lost: {error}")
        self.lost.set_result(None)


async def exchange() -> tuple[Recorder, Recorder]:
    """Sends MANY to a server, which sends it back and closes."""
    certificate, loop = make_certificate(), asyncio.get_running_loop()
    served = Recorder(replies=True)
    server = await loop.create_server(lambda: cheap_reads(served, tls=True), "127.0.0.1", 0, ssl=certificate.context)
    asked = Recorder()
    port = server.sockets[0].getsockname()[1]
    context = client_context(certificate.fingerprint)
    await loop.create_connection(lambda: cheap_reads(asked, tls=True), "127.0.0.1", port, ssl=context)
    await eventually(lambda: "made" in served.calls)
    served.transport.pause_reading()
    for half in (MANY[: len(MANY) // 2], MANY[len(MANY) // 2 :]):  # the first one alone pauses nothing with asyncio
        asked.transport.write(half)
    await eventually(lambda: "pause" in asked.calls)
    served.transport.resume_reading()
    await asyncio.gather(served.lost, asked.lost)
    server.close()
    return served, asked


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_all_data_and_all_calls_arrive(loop_factory: type[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        served, asked = runner.run(exchange())
    assert served.data == MANY
    assert asked.data == MANY
    assert asked.calls == ["made", "pause", "resume", "eof", "lost: None"]
    assert (served.calls[0], served.calls[-1]) == ("made", "lost: None")


async def test_without_tls_the_protocol_is_left_alone() -> None:
    recorder = Recorder()
    assert cheap_reads(recorder, tls=False) is recorder
