"""What can be seen of a cluster's secret from outside its processes."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from models import tiny
from tests.e2e.cluster import Cluster
from tests.secret import SECRET

pytestmark = pytest.mark.e2e

KEY = "open-sesame"

_ALL_PROTOCOLS = 0x0300  # ETH_P_ALL in network byte order


class Recorder:
    """Records all packets on the loopback interface. Needs CAP_NET_RAW."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, _ALL_PROTOCOLS)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._packets: list[bytes] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> bytes:
        """Returns everything that was sent."""
        self._ended.set()
        self._thread.join()
        self._socket.close()
        return b"|".join(self._packets)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._packets.append(self._socket.recv(1 << 17))
            except TimeoutError:
                continue


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    try:
        recorder = Recorder()
    except PermissionError:
        pytest.skip("recording packets needs CAP_NET_RAW")
    yield recorder
    recorder.stop()


def test_the_secret_is_in_no_packet_command_line_environment_lease_or_log(recorder: Recorder) -> None:
    with Cluster(model=str(tiny.CHECKPOINT), long_prefill_tokens=64, log_level="debug", api_key=[KEY]) as cluster:
        body = {"model": tiny.CHECKPOINT.name, "prompt": "copper " * 200, "max_tokens": 4}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
        assert answer.headers["x-cpd-route"] == "remote"
        seen = {"packets": recorder.stop()}
        names = ("combined-0", "prefill-0", "router-0")
        for name in names:
            process = Path("/proc", str(cluster.pid(name)))
            seen[f"command line of {name}"] = (process / "cmdline").read_bytes()
            seen[f"environment of {name}"] = (process / "environ").read_bytes()
            seen[f"log of {name}"] = "\n".join(cluster.log(name)).encode()
        with Redis.from_url(cluster.redis.url) as redis:
            leases = redis.hgetall("cpd:default:leases")
            seen["leases"] = b"\n".join(leases.values())
    assert len(leases) == len(names)
    for name in names:
        assert f"{name}".encode() in seen["packets"], "nothing was recorded"
    for where, data in seen.items():
        assert data, where
        assert SECRET.encode() not in data, where
    assert not any(KEY.encode() in data for where, data in seen.items() if where.startswith(("command line", "log")))
