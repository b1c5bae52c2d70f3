"""Choice of the transport."""

import sys
from pathlib import Path

import pytest

import kvtransfer
from cpd.common.errors import ConfigError
from kvtransfer import factory
from tests.kvtransfer.pools import Pool


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("import os; os.abort()", "ended with code -6"),
        ("raise ImportError('libgone.so')", "nixl_cu13 does not load: libgone.so"),
    ],
    ids=["crashes", "does not load"],
)
async def test_auto_takes_ucx_and_says_why_where_nixl_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, expected: str
) -> None:
    package = tmp_path / "nixl_cu13"
    package.mkdir()
    (package / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    transport = await kvtransfer.create("auto", Pool(4).memory, epoch=1, host="127.0.0.1")
    assert transport.name == "ucx"
    assert expected in transport.reason
    assert "nixl_cu13" not in sys.modules
    await transport.close()


async def test_a_requested_transport_has_no_reason() -> None:
    transport = await kvtransfer.create("ucx", Pool(4).memory, epoch=1, host="127.0.0.1")
    assert transport.reason == ""
    await transport.close()


async def test_auto_tries_nothing_where_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.factory.probe", None)
    transport = await kvtransfer.create("auto", Pool(4, device=0).memory, epoch=1, host="127.0.0.1")
    assert (transport.name, transport.reason) == ("nixl", "pages are in a GPU's memory")
    await transport.close()


async def test_ucx_does_not_take_a_gpus_pages() -> None:
    with pytest.raises(ConfigError, match="need nixl"):
        await kvtransfer.create("ucx", Pool(4, device=0).memory, epoch=1, host="127.0.0.1")


async def test_ucx_refuses_ipv6() -> None:
    with pytest.raises(ConfigError, match="ucx can't listen on IPv6 addresses"):
        await kvtransfer.create("ucx", Pool(4).memory, epoch=1, host="::1")


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [
        ("127.0.0.1", "some.name.invalid", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
        ("::", "::1", "::1"),
        ("0.0.0.0", "203.0.113.7", "0.0.0.0"),  # of a NAT, for instance
        ("0.0.0.0", "some.name.invalid", "0.0.0.0"),
    ],
)
async def test_pages_use_the_interface_that_peers_know(host: str, advertised: str, expected: str) -> None:
    assert await factory._device_host(host, advertised) == expected
