"""Certificates and the connections made with them."""

import asyncio
import ssl

import pytest

from cpd.common.stream import Stream, StreamServer, connect
from cpd.common.tls import make_certificate, split_address, without_fingerprint
from cpd.rpc import cpd_pb2 as pb

MOST = 4096


def test_an_address_names_the_certificate() -> None:
    certificate = make_certificate()
    address = certificate.named_in("[::1]:7")
    assert split_address(address) == ("::1", 7, certificate.fingerprint)
    assert split_address("host:7") == ("host", 7, b"")
    assert without_fingerprint(address) == "[::1]:7"


@pytest.mark.parametrize("address", ["", "host", "host:port", "host:1#xyz", "host:1#1"])
def test_what_is_no_address_is_an_error_like_one_that_is_not_there(address: str) -> None:
    with pytest.raises(OSError, match="is not an address"):
        split_address(address)


def test_each_certificate_is_another_one() -> None:
    assert make_certificate().fingerprint != make_certificate().fingerprint


async def test_another_certificate_than_the_addresss_is_refused_before_anything_is_said() -> None:
    heard: list[pb.RouterMessage | None] = []

    async def handle(stream: Stream[pb.RouterMessage]) -> None:
        heard.append(await stream.receive())

    server = StreamServer(pb.RouterMessage, MOST, handle)
    place = f"127.0.0.1:{await server.start('127.0.0.1', 0, make_certificate())}"
    with pytest.raises(OSError, match="it has another certificate than its lease says"):
        await connect(make_certificate().named_in(place), pb.WorkerMessage, MOST)
    await server.close()
    assert not any(heard)


async def test_a_server_without_tls_is_refused() -> None:
    async def handle(stream: Stream[pb.RouterMessage]) -> None:
        await stream.closed()

    server = StreamServer(pb.RouterMessage, MOST, handle)
    place = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        async with asyncio.timeout(20):
            await connect(make_certificate().named_in(place), pb.WorkerMessage, MOST)
    await server.close()
