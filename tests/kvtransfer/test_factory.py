"""Which transport a worker gets."""

import pytest

import kvtransfer
from kvtransfer.nixl import agent
from tests.kvtransfer.pools import Pool


async def test_auto_takes_ucx_where_nixl_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent, "MODULES", ("nixl_of_nobody",))
    transport = await kvtransfer.create("auto", Pool(4).memory, epoch=1, host="127.0.0.1")
    assert transport.name == "ucx"
    await transport.close()
    assert "nixl does not work here: NIXL is not installed" in caplog.text
