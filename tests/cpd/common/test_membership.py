import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from cpd.common.membership import Member, lease, members
from cpd.common.scaling import ScaleRequest, ScalingMailbox
from cpd.common.tls import make_certificate
from cpd.common.trust import ClusterSecret
from deploy.redis import EmbeddedRedis, embedded_redis
from tests.waiting import DEADLINE_S

MEMBER = Member("combined-0", "combined", "127.0.0.1:1", "here", 42)
KEY = "cpd:c:leases"
NO_SECRET, SECRET = ClusterSecret(""), ClusterSecret("secret")
SCALE: ScaleRequest = {"id": "1", "launch": "2", "model": "", "combined": 2, "prefill": None, "router": None}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        yield redis


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as client:
        yield client


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - nothing tells when Redis changes
            await asyncio.sleep(0.02)


@asynccontextmanager
async def held(
    redis: Redis, member: Member = MEMBER, ttl_s: float = 60, secret: ClusterSecret = NO_SECRET
) -> AsyncIterator[asyncio.Event]:
    """A lease of `member`, which is listed; the event is set when a newer process has the lease."""
    superseded = asyncio.Event()
    async with lease(redis, "c", secret, member, ttl_s, superseded.set):
        await eventually(lambda: _lists(redis, member))
        yield superseded


async def put(redis: Redis, member_id: str | bytes, member: bytes, expires_ms: int = 9 * 10**12) -> None:
    """Writes a lease that did not come from this version."""
    await redis.hset(KEY, member_id, b"%d 1 %b" % (expires_ms, member))


async def test_a_member_is_listed_while_its_lease_is_held(redis: Redis) -> None:
    async with held(redis):
        assert await members(redis, "other", NO_SECRET) == []
    assert await members(redis, "c", NO_SECRET) == []


async def test_a_lease_is_renewed_before_it_runs_out(redis: Redis) -> None:
    async with held(redis, ttl_s=3):
        before = await redis.hget(KEY, MEMBER.id)

        async def renewed() -> bool:
            return bool(await redis.hget(KEY, MEMBER.id) != before)

        await eventually(renewed)
        assert await _lists(redis, MEMBER)


async def test_the_lease_of_a_killed_holder_runs_out(server: EmbeddedRedis, redis: Redis) -> None:
    async with held(redis, replace(MEMBER, id="other")):  # which keeps the hash
        await _die_with_lease(server)
        await eventually(lambda: _has_ids(redis, "other"))
        assert await redis.hkeys(KEY) == [b"other"]


async def test_a_cluster_that_was_killed_leaves_nothing_in_redis(server: EmbeddedRedis, redis: Redis) -> None:
    await _die_with_lease(server)

    async def empty() -> bool:
        return not await redis.keys("*")

    await eventually(empty)


async def test_a_short_lease_does_not_shorten_the_others(server: EmbeddedRedis, redis: Redis) -> None:
    async with held(redis, ttl_s=60):
        await _die_with_lease(server)
        await eventually(lambda: _has_ids(redis, MEMBER.id))
        assert await redis.pttl(KEY) > 10_000


async def test_leases_are_found_among_many_other_keys_in_one_call(redis: Redis) -> None:
    await redis.mset({f"cpd:c:other:{i}": i for i in range(1000)})
    async with held(redis):
        await redis.config_resetstat()
        await members(redis, "c", NO_SECRET)
        calls = await redis.info("commandstats")
        assert calls["cmdstat_evalsha"]["calls"] == 1
        assert not {"cmdstat_scan", "cmdstat_keys", "cmdstat_mget"} & calls.keys()


async def test_a_lease_comes_back_after_redis_was_away(server: EmbeddedRedis, redis: Redis) -> None:
    async with held(redis, ttl_s=0.4):
        [before] = await members(redis, "c", NO_SECRET)
        server.stop()
        server.start()
        await eventually(lambda: _lists(redis, MEMBER))
        assert await members(redis, "c", NO_SECRET) == [before]  # routers see no new process


async def test_a_process_that_starts_without_redis_registers_when_it_answers(
    server: EmbeddedRedis, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()

    async def warned() -> bool:
        return "Redis does not answer" in caplog.text

    async with lease(redis, "c", NO_SECRET, MEMBER, 0.4, lambda: None):
        await eventually(warned)
        server.start()
        await eventually(lambda: _lists(redis, MEMBER))


async def test_of_two_processes_with_one_id_the_newer_keeps_the_lease(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    newer = replace(MEMBER, pid=43)
    async with held(redis, ttl_s=2) as older_superseded, held(redis, newer, ttl_s=2) as newer_superseded:
        await asyncio.wait_for(older_superseded.wait(), DEADLINE_S)
        assert await _lists(redis, newer)
        assert not newer_superseded.is_set()
    [record] = caplog.records
    assert record.levelname == "CRITICAL"
    assert "a newer process has the id combined-0, so this one ends for good" in record.getMessage()
    assert '"pid":43' in record.getMessage()


async def test_the_end_of_the_older_process_does_not_remove_the_newer_ones_lease(redis: Redis) -> None:
    newer = replace(MEMBER, pid=43)
    older = lease(redis, "c", NO_SECRET, MEMBER, 60, lambda: None)
    await older.__aenter__()
    await eventually(lambda: _lists(redis, MEMBER))
    async with held(redis, newer):
        await older.__aexit__(None, None, None)
        assert await _lists(redis, newer)


async def test_the_end_of_the_newer_process_does_not_remove_the_older_ones_lease(
    server: EmbeddedRedis, redis: Redis
) -> None:
    """The newer one could not renew its lease for a while, and the older one, which was away, took the id again."""
    newer = replace(MEMBER, pid=43)
    async with held(redis, newer):
        await put(redis, MEMBER.id, orjson.dumps(asdict(MEMBER)))
    assert await _lists(redis, MEMBER)


async def test_an_expired_lease_of_a_newer_process_stops_nobody(redis: Redis) -> None:
    async with held(redis, ttl_s=2) as superseded:
        expired = b"1 %d {}" % (9 * 10**15)
        await redis.hset(KEY, MEMBER.id, expired)

        async def renewed() -> bool:  # does not read the leases, which would remove the expired one
            return bool(await redis.hget(KEY, MEMBER.id) != expired)

        await eventually(renewed)
        assert not superseded.is_set()


async def test_a_renewal_replaces_an_entry_that_is_no_lease(redis: Redis) -> None:
    async with held(redis, ttl_s=2) as superseded:
        await redis.hset(KEY, MEMBER.id, "what is this?")
        await eventually(lambda: _lists(redis, MEMBER))
        assert not superseded.is_set()


UNREADABLE = {
    "no JSON": b"{",
    "not UTF-8": b'{"id": "\xff"}',
    "no object": b"[1]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "nothing in it": b"{}",
    "no address": orjson.dumps({"id": "x", "kind": "router", "host": "h", "pid": 1}),
    "a number for a text": orjson.dumps(asdict(MEMBER) | {"address": 7}),
    "a text for a number": orjson.dumps(asdict(MEMBER) | {"incarnation": "7"}),
    "an unknown kind": orjson.dumps(asdict(MEMBER) | {"kind": "poet"}),
}


async def test_a_lease_with_fields_of_a_later_version_is_read_without_them(redis: Redis) -> None:
    await put(redis, MEMBER.id, orjson.dumps(asdict(MEMBER) | {"colour": {"is": "blue"}}))
    assert await members(redis, "c", NO_SECRET) == [MEMBER]


@pytest.mark.parametrize("member", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_lease_that_cannot_be_read_is_skipped_and_logged_once(
    redis: Redis, member: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await put(redis, MEMBER.id, orjson.dumps(asdict(MEMBER)))
    await put(redis, "bad", member)
    unreadable: set[str] = set()
    for _ in range(3):
        assert await members(redis, "c", NO_SECRET, unreadable) == [MEMBER]
    await redis.hset(KEY, b"worse\xff", member)  # not even with a time
    for _ in range(3):
        assert await members(redis, "c", NO_SECRET, unreadable) == [MEMBER]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "'bad'" in told[0]
    assert "'worse\\xff'" in told[1]
    assert all(len(line.splitlines()) == 1 for line in told)
    await redis.hdel(KEY, "bad")
    assert await members(redis, "c", NO_SECRET, unreadable) == [MEMBER]
    assert len(unreadable) == 1


_NEXT_DIGIT = bytes.maketrans(b"0123456789abcdef", b"123456789abcdef0")


@pytest.mark.parametrize(
    "changed",
    [
        lambda lease: lease.replace(b"127.0.0.1:1", b"127.0.0.1:2"),
        lambda lease: lease.replace(b'"session":""', b'"session":"127.0.0.1:6"'),
        lambda lease: lease.replace(b'"incarnation":', b'"incarnation":9'),
        lambda lease: re.sub(rb" [0-9a-f]{64} ", lambda found: found[0].translate(_NEXT_DIGIT), lease),
        lambda lease: re.sub(rb" [0-9a-f]{64} ", b" ", lease),
    ],
    ids=["its address", "its session", "its incarnation", "its signature", "no signature"],
)
async def test_a_lease_that_was_changed_is_ignored_and_logged_once(
    redis: Redis, changed: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(MEMBER, id="other")
    async with held(redis, secret=SECRET), held(redis, other, secret=SECRET):
        lease = await redis.hget(KEY, MEMBER.id)
        assert isinstance(lease, bytes)
        assert changed(lease) != lease
        await redis.hset(KEY, MEMBER.id, changed(lease))
        unreadable: set[str] = set()
        for _ in range(3):
            assert [member.id for member in await members(redis, "c", SECRET, unreadable)] == ["other"]
    [record] = caplog.records
    assert "the lease of b'combined-0' is ignored: it is not signed with the cluster's secret" in record.getMessage()


@pytest.mark.parametrize("wrote", [NO_SECRET, ClusterSecret("guess")], ids=["unsigned", "another secret"])
async def test_a_lease_of_a_stranger_is_ignored(redis: Redis, wrote: ClusterSecret) -> None:
    async with held(redis, secret=wrote):
        assert await members(redis, "c", SECRET) == []


async def test_a_signed_lease_is_no_lease_of_another_id_or_cluster(redis: Redis) -> None:
    async with held(redis, secret=SECRET):
        lease = await redis.hget(KEY, MEMBER.id)
        assert lease is not None
        await redis.hset(KEY, "other", lease)
        await redis.hset("cpd:d:leases", MEMBER.id, lease)
        assert [member.id for member in await members(redis, "c", SECRET)] == [MEMBER.id]
        assert await members(redis, "d", SECRET) == []


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (lambda own: orjson.dumps(asdict(MEMBER) | {"address": "203.0.113.1:1"}), "it is not signed"),
        (lambda own: own.split(b" ", 2)[2], "its incarnation was changed"),
    ],
    ids=["another address", "its own lease, as a newer one's"],
)
async def test_a_forged_newer_process_ends_nobody(
    redis: Redis, forged: Callable[[bytes], bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with held(redis, ttl_s=2, secret=SECRET) as superseded:
        own = await redis.hget(KEY, MEMBER.id)
        assert isinstance(own, bytes)
        placed = b"%d %d %b" % (9 * 10**12, 9 * 10**15, forged(own))
        await redis.hset(KEY, MEMBER.id, placed)

        async def restored() -> bool:
            return bool(await redis.hget(KEY, MEMBER.id) != placed)

        await eventually(restored)
        await eventually(lambda: _lists(redis, MEMBER, SECRET))
        assert not superseded.is_set()
    assert caplog.text.count(f"the lease of combined-0 was overwritten and is restored: {reason}") == 1


async def test_a_lease_that_cannot_be_read_expires(redis: Redis) -> None:
    await put(redis, "bad", b"{", expires_ms=1)
    assert await members(redis, "c", NO_SECRET) == []
    assert not await redis.exists(KEY)


async def test_the_documented_rights_in_redis_are_enough(server: EmbeddedRedis, redis: Redis) -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    rule = re.findall(r"^ACL SETUSER (.*)$", text, re.MULTILINE)[0]
    await cast(Any, redis).execute_command("ACL", "SETUSER", *rule.replace("PASSWORD", "sesame").split())
    async with Redis(unix_socket_path=server.url.removeprefix("unix://"), username="cpd", password="sesame") as client:
        async with held(client, secret=SECRET):
            assert [member.id for member in await members(client, "c", SECRET)] == [MEMBER.id]
            mailbox = ScalingMailbox(client, "c", SECRET)
            await mailbox.write_request(SCALE)
            assert await mailbox.read_request() == SCALE
            await mailbox.remove_request()
            assert await mailbox.read_request() is None
            for forbidden in (client.get("other"), client.keys("*"), client.config_get("dir")):
                with pytest.raises(NoPermissionError):
                    await forbidden
        assert await members(client, "c", SECRET) == []


async def test_redis_may_be_reached_with_tls(server: EmbeddedRedis) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to = await asyncio.open_unix_connection(server.url.removeprefix("unix://"))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, to[1]), pump(to[0], writer), return_exceptions=True)

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=make_certificate().context)
    url = f"rediss://127.0.0.1:{proxy.sockets[0].getsockname()[1]}?ssl_cert_reqs=none"
    async with proxy, Redis.from_url(url) as client, held(client, secret=SECRET):
        assert [member.id for member in await members(client, "c", SECRET)] == [MEMBER.id]


async def _die_with_lease(server: EmbeddedRedis) -> None:
    """Runs a process that is killed as soon as it has a lease of 0.4 s."""
    holder = (
        "import asyncio, os, signal\n"
        "from redis.asyncio import Redis\n"
        "from cpd.common.membership import Member, lease, members\n"
        "from cpd.common.trust import ClusterSecret\n"
        "async def main():\n"
        f"    redis = Redis.from_url({server.url!r})\n"
        "    secret = ClusterSecret('')\n"
        "    async with lease(redis, 'c', secret, Member('x', 'combined', 'a', 'h', 1), 0.4, lambda: None):\n"
        "        while all(m.id != 'x' for m in await members(redis, 'c', secret)): await asyncio.sleep(0.02)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", holder)
    assert await process.wait() == -9


async def _lists(redis: Redis, member: Member, secret: ClusterSecret = NO_SECRET) -> bool:
    """True if `member`, in whatever incarnation, is listed."""
    try:
        return member in [replace(found, incarnation=0) for found in await members(redis, "c", secret)]
    except RedisConnectionError:
        return False


async def _has_ids(redis: Redis, *ids: str) -> bool:
    return [member.id for member in await members(redis, "c", NO_SECRET)] == list(ids)
