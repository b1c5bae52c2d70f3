import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from cpd.common.errors import CPDError
from deploy.redis import EmbeddedRedis, embedded_redis
from tests.deploy.test_process import alive, wait_for


def test_redis_serves_only_on_its_socket_and_leaves_nothing_behind(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    with embedded_redis(socket) as redis:
        with Redis.from_url(redis.url) as client:
            client.set("key", "value", px=60_000)
            assert client.get("key") == b"value"
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("save") == {"save": ""}
        assert socket.stat().st_mode & 0o077 == 0
        pid = redis.pid
    assert not alive(pid)
    assert not socket.exists()


def test_redis_can_be_restarted_after_its_death(tmp_path: Path) -> None:
    with embedded_redis(tmp_path / "redis.sock") as redis:
        os.kill(redis.pid, signal.SIGKILL)
        wait_for(lambda: not redis.running, "dead")
        redis.start()
        with Redis.from_url(redis.url) as client:
            assert client.ping()


def test_redis_dies_with_a_killed_owner(tmp_path: Path) -> None:
    owner = (
        "import sys, signal; from pathlib import Path; from deploy.redis import EmbeddedRedis;"
        f"redis = EmbeddedRedis(Path({str(tmp_path / 'redis.sock')!r})); redis.start();"
        "print(redis.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        wait_for(lambda: not alive(pid), "Redis ended")


def test_a_failed_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "redis.sock").mkdir()
    redis = EmbeddedRedis(tmp_path / "redis.sock")
    with pytest.raises(CPDError, match=r"did not start: .*socket"):
        redis.start()
    assert not redis.running
