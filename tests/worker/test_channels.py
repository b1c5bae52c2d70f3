import asyncio

import grpc
import pytest

import worker.channels
from worker.channels import Channels


async def test_calls_to_one_address_share_a_connection() -> None:
    channels = Channels()
    async with channels.use("127.0.0.1:1"), channels.use("127.0.0.1:1"), channels.use("127.0.0.1:2"):
        assert len(channels._entries) == 2
    await channels.close()
    assert not channels._entries


async def test_the_longest_idle_connections_are_closed_and_used_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.channels, "MAX_IDLE", 2)
    channels = Channels()
    async with channels.use("used:1"):
        for port in range(5):
            async with channels.use(f"idle:{port}"):
                pass
        assert set(channels._entries) == {"used:1", "idle:3", "idle:4"}
    await channels.close()


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channels = Channels()
    async with channels.use(address), asyncio.timeout(10):
        await channels._entries[address].channel.channel_ready()
    await channels.close()
    await server.stop(None)
