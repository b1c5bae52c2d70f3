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
