import socket
import subprocess
import sys
from typing import Any

import httpx2
import pytest

import deploy.drain
from cpd.common.errors import CPDError
from deploy.state import ClusterState


def test_the_last_router_is_waited_for_however_long_it_drains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        router = {"id": "router-0", "admin": "tcp://here", "host": socket.gethostname(), "pid": process.pid}
        answers = [{"workers": [], "routers": [{**router, "incarnation": 1}]}]
        polls: list[float] = []

        def read(state: ClusterState) -> dict[str, Any]:
            if answers:
                return answers.pop()
            raise CPDError("does not answer")

        def sleep(duration_s: float) -> None:
            polls.append(duration_s)
            assert process.stdin is not None
            if len(polls) == 2:
                process.communicate(b"\n")

        posted: list[str] = []

        def post(url: str, **given: Any) -> httpx2.Response:
            posted.append(url)
            return httpx2.Response(200, request=httpx2.Request("POST", url))

        monkeypatch.setattr(deploy.drain, "running_cluster", lambda name: ClusterState(name, 1, "http://x"))
        monkeypatch.setattr(deploy.drain, "read_cluster", read)
        monkeypatch.setattr(deploy.drain, "base_url", lambda admin: ("http://here", False))
        monkeypatch.setattr(deploy.drain, "_SILENT_S", -1.0)
        monkeypatch.setattr("deploy.drain.httpx2.post", post)
        monkeypatch.setattr("deploy.drain.time.sleep", sleep)
        deploy.drain.drain("c", "router-0", None)
        assert posted == ["http://here/drain"]
        assert len(polls) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "router-0 has ended."
