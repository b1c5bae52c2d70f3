"""Stored responses, with a real Redis."""

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from cpd.common.trust import ClusterSecret
from router.api.openai_responses import store as stores
from router.api.openai_responses.documents import ResponseDocument
from router.api.openai_responses.store import ResponseStore
from router.errors import ApiError
from tests.router.conftest import eventually

SECRET = ClusterSecret("a secret of sixteen characters")
ROOT = Path(__file__).resolve().parents[4]

_ids = itertools.count()


def _response(text: str = "") -> ResponseDocument:
    document = {"id": f"resp_{next(_ids):048x}", "object": "response", "instructions": text}
    return cast(ResponseDocument, document)


def _store(redis: Redis, cluster: str, *, ttl_s: float = 60.0, secret: ClusterSecret = SECRET) -> ResponseStore:
    return ResponseStore(redis, cluster, secret, ttl_s)


async def _has(store: ResponseStore, response: ResponseDocument, tenant: str = "me") -> bool:
    try:
        return await store.response(tenant, response["id"]) == response
    except ApiError:
        return False


async def test_a_response_and_its_conversation_come_back(redis: Redis, cluster: str) -> None:
    store, response, items = _store(redis, cluster), _response("你好"), [{"type": "message", "content": "x"}]
    await store.put("me", response, items)
    assert await store.response("me", response["id"]) == response
    assert await store.items("me", response["id"]) == items
    await store.delete("me", response["id"])
    assert not await _has(store, response)
    assert await redis.keys(f"cpd:{cluster}:*") == []


async def test_it_is_the_tenants_own(redis: Redis, cluster: str) -> None:
    store, response = _store(redis, cluster), _response()
    await store.put("me", response, [])
    for tenant in ("you", ""):
        assert not await _has(store, response, tenant)
        with pytest.raises(ApiError):
            await store.delete(tenant, response["id"])
    assert await _has(store, response)


async def test_it_is_gone_after_its_time(redis: Redis, cluster: str) -> None:
    store, response = _store(redis, cluster, ttl_s=0.05), _response()
    await store.put("me", response, [])

    async def is_gone() -> bool:
        return not await _has(store, response) and not await redis.keys(f"cpd:{cluster}:*")

    await eventually(is_gone)


async def test_the_oldest_go_when_there_are_too_many(
    redis: Redis, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_RESPONSES", 3)
    store, responses = _store(redis, cluster), [_response() for _ in range(5)]
    await store.put("you", other := _response(), [])
    for response in responses:
        await store.put("me", response, [])
    assert [await _has(store, response) for response in responses] == [False, False, True, True, True]
    assert await _has(store, other, "you")
    assert await redis.zcard(f"cpd:{cluster}:responses:me") == 3


async def test_the_oldest_go_when_they_are_too_large(
    redis: Redis, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_BYTES", 3_000)
    store, responses = _store(redis, cluster), [_response("x" * 1_000) for _ in range(4)]
    for response in responses:
        await store.put("me", response, [])
    assert [await _has(store, response) for response in responses] == [False, False, True, True]
    await store.put("me", huge := _response("x" * 4_000), [])
    assert not await _has(store, huge)


async def test_what_has_expired_is_not_counted(redis: Redis, cluster: str) -> None:
    brief, store = _store(redis, cluster, ttl_s=0.05), _store(redis, cluster)
    await brief.put("me", gone := _response(), [])
    await store.put("me", first := _response(), [])

    async def is_gone() -> bool:
        return not await _has(store, gone)

    await eventually(is_gone)
    await store.put("me", second := _response(), [])
    assert await redis.zcard(f"cpd:{cluster}:responses:me") == 2
    assert await _has(store, first)
    assert await _has(store, second)


async def test_nobody_else_can_put_words_into_a_conversation(redis: Redis, cluster: str) -> None:
    store, response, other = _store(redis, cluster), _response(), _response()
    await store.put("me", response, [])
    key = f"cpd:{cluster}:responses:me:"
    value = cast(bytes, await redis.get(key + response["id"]))
    await redis.set(key + response["id"], value.replace(b'"items":[]', b'"items":[1]'))
    assert not await _has(store, response)
    await redis.set(key + other["id"], value)  # another one's
    assert not await _has(store, other)
    forged = _store(redis, cluster, secret=ClusterSecret("another secret of some length"))
    await forged.put("me", response, [])
    assert not await _has(store, response)


async def test_without_a_secret_nothing_is_signed(redis: Redis, cluster: str) -> None:
    store, response = _store(redis, cluster, secret=ClusterSecret("")), _response()
    await store.put("me", response, [])
    assert await _has(store, response)


@pytest.mark.parametrize("response_id", ["", "resp_1", "*", "resp_" + "0" * 48, "other:resp_" + "0" * 48])
async def test_an_unknown_id_is_not_found(redis: Redis, cluster: str, response_id: str) -> None:
    with pytest.raises(ApiError) as refusal:
        await _store(redis, cluster).response("me", response_id)
    assert refusal.value.status == 404


async def test_without_redis_a_response_is_served_and_can_not_be_read(cluster: str, tmp_path: Path) -> None:
    async with Redis.from_url(f"unix://{tmp_path}/none") as nowhere:
        store, response = _store(nowhere, cluster), _response()
        async with asyncio.timeout(30):
            await store.put("me", response, [])
            for asked in (store.response("me", response["id"]), store.items("me", response["id"])):
                with pytest.raises(ApiError) as refusal:
                    await asked
                assert refusal.value.status == 503


async def test_the_documented_rights_of_a_redis_user_are_enough(redis: Redis, redis_url: str, cluster: str) -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    (rule,) = re.findall(r"^ACL SETUSER (.*)$", text, re.MULTILINE)
    (more,) = re.findall(r"`--store-responses` it also needs `([^`]*)`", text)
    words = rule.replace("cpd", "storer", 1).replace("PASSWORD", "sesame").split()
    execute: Any = redis.execute_command
    await execute("ACL", "SETUSER", *words, *more.split())
    try:
        async with Redis.from_url(redis_url, username="storer", password="sesame") as limited:
            store, response = _store(limited, cluster), _response()
            await store.put("me", response, [])
            assert await _has(store, response)
            await store.delete("me", response["id"])
    finally:
        await execute("ACL", "DELUSER", "storer")
