"""The certificate of the HTTP endpoint, replaced while clients use it."""

import asyncio
import contextlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from cpd.common.errors import ConfigError
from router import followed_files
from router.server_certificate import certificate_files, server_context
from tests import certificates, waiting
from tests.router.conftest import Router, Says, StartRouter, StartWorker, eventually

CHAT = {"model": "small-model", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def make_pair(directory: Path) -> tuple[Path, Path]:
    directory.mkdir()
    return certificates.certificate_files(directory)


def served(port: int) -> str:
    """The certificate, in PEM, that a new connection sees. Blocks."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=30)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    cert, key = make_pair(tmp_path / "one")
    other_cert, _ = make_pair(tmp_path / "other")
    assert certificate_files(None, None) is None
    assert certificate_files(cert, key) == (cert, key)
    server_context(cert, key)
    for one, two in ((cert, None), (None, key)):
        with pytest.raises(ConfigError, match="belong together"):
            certificate_files(one, two)
    for one, two, reason in (
        (cert, tmp_path / "none.pem", "can't be read: No such file"),
        (key, key, "can't be used"),
        (other_cert, key, "can't be used"),
    ):
        with pytest.raises(ConfigError, match=reason):
            server_context(one, two)


class TestReplaced:
    @pytest.fixture
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
        """The files that a router serves with."""
        monkeypatch.setattr(followed_files, "POLL_S", 0.01)
        return make_pair(tmp_path / "served")

    @pytest.fixture
    async def router(
        self, start_router: StartRouter, start_worker: StartWorker, says: Says, files: tuple[Path, Path]
    ) -> Router:
        """A router that serves HTTPS and is ready."""
        cert, key = files
        return await start_router(await start_worker(says("the fox")), tls_cert=cert, tls_key=key)

    async def test_under_load_no_request_fails_and_new_connections_see_the_new_one(
        self, router: Router, files: tuple[Path, Path], tmp_path: Path
    ) -> None:
        pairs = [files, make_pair(tmp_path / "b"), make_pair(tmp_path / "c")]
        trusted = ssl.create_default_context()
        for cert, _ in pairs:
            trusted.load_verify_locations(cert)
        url = f"https://localhost:{port_of(router)}"
        async with clients_in_a_loop(url, trusted) as count:
            for cert, key in pairs[1:]:
                shutil.copy(key, files[1])  # for a moment it does not fit
                shutil.copy(cert, files[0])
                await eventually(is_served(router, cert))
                before = count()
                await waiting.eventually(lambda before=before: count() > before + 20)  # type: ignore[misc]

    async def test_a_pair_that_does_not_fit_is_kept_out_and_logged_once(
        self, router: Router, files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def errors() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

        good = files[0].read_text()
        cert, key = make_pair(tmp_path / "other")
        shutil.copy(cert, files[0])
        await waiting.eventually(lambda: bool(errors()))
        assert await asyncio.to_thread(served, port_of(router)) == good
        shutil.copy(key, files[1])
        await eventually(is_served(router, cert))
        files[1].write_text("no key")
        await waiting.eventually(lambda: len(errors()) > 1)
        assert await asyncio.to_thread(served, port_of(router)) == cert.read_text()
        assert [error.partition(": ")[0] for error in errors()] == ["the certificate and its key stay as they were"] * 2
        assert all("can't be used" in error for error in errors())


def port_of(router: Router) -> int:
    return int(router.url.rpartition(":")[2])


def is_served(router: Router, cert: Path) -> Callable[[], Awaitable[bool]]:
    """Whether new connections see this certificate."""
    expected = cert.read_text()

    async def check() -> bool:
        return await asyncio.to_thread(served, port_of(router)) == expected

    return check


@contextlib.asynccontextmanager
async def clients_in_a_loop(url: str, trusted: ssl.SSLContext) -> AsyncIterator[Callable[[], int]]:
    """Clients that send one request after the other, some over new connections; yields the number of answers.

    Raises:
        ExceptionGroup: A request failed.
    """
    answers, ended = 0, asyncio.Event()

    async def load(keeps: int) -> None:
        nonlocal answers
        limits = httpx.Limits(max_keepalive_connections=keeps)
        async with httpx.AsyncClient(base_url=url, verify=trusted, limits=limits, timeout=30) as client:
            while not ended.is_set():
                answer = await client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 200
                assert answer.text.endswith("data: [DONE]\n\n")
                answers += 1

    async with asyncio.TaskGroup() as group:
        for keeps in (0, 0, 1, 1):
            group.create_task(load(keeps))
        try:
            yield lambda: answers
        finally:
            ended.set()
