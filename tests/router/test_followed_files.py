"""Key files and certificates are read again while requests run."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router import followed_files
from router.api.tenants import Keys, read_keys
from router.errors import ApiError
from router.followed_files import FollowedFiles, follow
from tests import waiting
from tests.router.conftest import Says, StartRouter, StartWorker, eventually

TEXT = {"model": "small-model", "prompt": "Hello?", "max_tokens": 3}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A key file with one key."""
    _replace(tmp_path / "keys.yaml", "[{key: old, name: a}]")
    return tmp_path / "keys.yaml"


def _replace(file: Path, text: str, mode: int = 0o600) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(file)


def _let_read(file: Path) -> None:
    file.chmod(0o600)


def _remove(file: Path) -> None:
    file.unlink()


def _is_valid(keys: Keys, key: str) -> bool:
    try:
        keys.tenant(f"Bearer {key}".encode())
    except ApiError:
        return False
    return True


async def _until(keys: Keys, valid: str) -> None:
    async def is_valid() -> bool:
        return _is_valid(keys, valid)

    await eventually(is_valid)


class TestFollow:
    @pytest.fixture
    async def reread(self) -> asyncio.Event:
        """Asks for a look at the file."""
        return asyncio.Event()

    @pytest.fixture
    async def keys(self, file: Path, reread: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keys]:
        """The keys of the file, which is followed."""
        monkeypatch.setattr(followed_files, "POLL_S", 0.01)
        keys = Keys([])
        files = FollowedFiles("API keys", [file], lambda: read_keys(file), keys.replace)
        following = asyncio.create_task(follow([files], reread))
        yield keys
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    async def test_a_changed_file_is_read(self, file: Path, keys: Keys) -> None:
        _replace(file, "[{key: old, name: a}, {key: new, name: a}]")
        await _until(keys, "new")
        assert _is_valid(keys, "old")
        _replace(file, "[{key: new, name: a}]")
        await waiting.eventually(lambda: not _is_valid(keys, "old"))

    async def test_a_broken_or_missing_file_keeps_the_keys_and_is_logged_once(
        self, file: Path, keys: Keys, reread: asyncio.Event, caplog: pytest.LogCaptureFixture
    ) -> None:
        def errors() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

        _replace(file, "[{key: secret-key, nmae: a}]")
        await waiting.eventually(lambda: len(errors()) == 1)
        assert "Extra inputs" in errors()[0]
        assert "secret-key" not in caplog.text
        _remove(file)
        await waiting.eventually(lambda: len(errors()) == 2)
        assert _is_valid(keys, "old")
        _replace(file, "[{key: new}]")
        await _until(keys, "new")
        assert len(errors()) == 2

    async def test_a_file_that_becomes_readable_is_read(
        self, file: Path, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read_text = Path.read_text

        def unless_forbidden(path: Path) -> str:  # tests may run as root, who may read everything
            if path.stat().st_mode & 0o777 == 0:
                raise PermissionError(13, "Permission denied")
            return read_text(path)

        monkeypatch.setattr(Path, "read_text", unless_forbidden)
        _replace(file, "[{key: new}]", mode=0)
        await waiting.eventually(lambda: "Permission denied" in caplog.text)
        _let_read(file)
        await _until(keys, "new")

    async def test_it_is_read_when_told_to(
        self, file: Path, keys: Keys, reread: asyncio.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FollowedFiles, "_look", lambda self: [])  # as after a change that shows nowhere
        await asyncio.sleep(0)
        _replace(file, "[{key: new}]")
        reread.set()
        await _until(keys, "new")


async def test_a_key_is_replaced_under_load_without_a_failed_request(
    start_router: StartRouter, start_worker: StartWorker, says: Says, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_files, "POLL_S", 0.01)
    router = await start_router(await start_worker(says("the fox")), api_key=["operator"], api_key_file=file)
    statuses: list[int] = []

    async def post(key: str) -> int:
        response = await router.http.post("/v1/completions", json=TEXT, headers={"authorization": f"Bearer {key}"})
        return response.status_code

    async def load() -> None:
        while True:
            statuses.append(await post(key))

    key = "old"
    loads = [asyncio.create_task(load()) for _ in range(4)]
    try:
        _replace(file, "[{key: old, name: a}, {key: new, name: a}]")

        async def new_is_valid() -> bool:
            return await post("new") == 200

        await eventually(new_is_valid)
        key, before = "new", len(statuses)
        await waiting.eventually(lambda: len(statuses) > before + 20)
        _replace(file, "[{key: new, name: a}]")

        async def old_is_refused() -> bool:
            return await post("old") == 401

        await eventually(old_is_refused)
        before = len(statuses)
        await waiting.eventually(lambda: len(statuses) > before + 20)
    finally:
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    assert set(statuses) == {200}
    usage = (await router.http.get("/usage")).raise_for_status().json()
    assert list(usage["tenants"]) == ["a"]
    assert usage["tenants"]["a"]["completion_tokens"] >= 3 * len(statuses)
    assert (
        await post("new"),
        (await router.http.get("/usage", headers={"authorization": "Bearer new"})).status_code,
    ) == (
        200,
        403,
    )
