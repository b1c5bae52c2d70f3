import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

from cpd.common import redis_client
from cpd.common.settings import ClusterSettings
from deploy import doctor as checks
from deploy.doctor import CHECKS, Finding, doctor, examine
from deploy.state import ClusterDir, ClusterState
from models import tiny

SECURITY = Path(__file__).parents[2] / "docs/security.md"


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def find(check: str, **settings: object) -> list[Finding]:
    given = ClusterSettings.load({"model": str(tiny.CHECKPOINT), "port": 0, **settings})
    return list(examine(CHECKS[check], given))


def test_a_sound_machine_can_start_the_cluster(capsys: pytest.CaptureFixture[str], redis_url: str) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor(ClusterSettings.load({"model": str(tiny.CHECKPOINT), "port": 0, "redis_url": redis_url}))
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0, lines
    assert {line[8:20].strip() for line in lines} == set(CHECKS)
    assert {line[:8].strip() for line in lines} <= {"ok", "warning"}


def test_one_error_gives_exit_code_1_and_the_other_checks_are_made(
    capsys: pytest.CaptureFixture[str], port: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor(ClusterSettings.load({"model": "/none", "port": port}))
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert [line[8:20].strip() for line in lines if line.startswith("error")] == ["port", "model"]


@pytest.mark.parametrize(
    ("check", "settings", "sentence"),
    [
        ("model", {"kv_memory": "100TiB"}, "GiB"),
        ("model", {"model": "/none"}, "there is no checkpoint directory /none"),
        ("settings", {"policy": "no-such"}, "no-such"),
        ("settings", {"profile": "/none.json"}, "/none.json"),
        ("settings", {"max_workers": "4"}, "--max-workers is for a planner"),
        ("settings", {"secret_file": "/none"}, "--secret-file /none can't be read"),
        ("redis", {"redis_url": "redis://:hidden@127.0.0.1:1"}, "127.0.0.1 does not answer"),
        ("ray", {"ray_address": "127.0.0.1:1"}, "nothing answers there"),
    ],
)
def test_what_the_cluster_cannot_start_with_is_an_error(check: str, settings: dict[str, str], sentence: str) -> None:
    (finding,) = find(check, **settings)
    assert finding.level == "error"
    assert sentence in finding.text
    assert "hidden" not in finding.text


def user(redis_url: str, *allowed: str) -> str:
    """Adds a Redis user who may run these commands; returns the URL."""
    with Redis.from_url(redis_url) as redis:
        redis.execute_command("ACL", "SETUSER", "cpd", "reset", "on", ">PASSWORD", "~cpd:*", *allowed)
    return redis_url.replace("unix://", "unix://cpd:PASSWORD@")


def test_the_redis_user_of_the_documents_is_enough(redis_url: str) -> None:
    (line,) = (line for line in SECURITY.read_text().splitlines() if line.startswith("ACL SETUSER cpd on"))
    allowed = [word for word in line.split() if word.startswith("+")]
    (finding,) = find("redis", redis_url=user(redis_url, *allowed))
    assert finding.level == "ok"
    assert "version" in finding.text


def test_a_redis_user_who_may_not_run_the_scripts_is_an_error(redis_url: str) -> None:
    (finding,) = find("redis", redis_url=user(redis_url, "+ping", "+hello", "+client|setinfo"))
    assert finding.level == "error"
    assert "permissions" in finding.text


def test_a_redis_whose_version_is_not_told_is_a_warning(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise NoPermissionError

    monkeypatch.setattr(redis_client.Redis, "execute_command", refuse)
    tried: list[str] = []
    monkeypatch.setattr(checks, "read_leases", lambda url, *_: tried.append(url))
    (finding,) = find("redis", redis_url=redis_url)
    assert (finding.level, tried) == ("warning", [redis_url])


def test_the_embedded_redis_is_tried_and_several_hosts_need_another() -> None:
    assert [finding.level for finding in find("redis")] == ["ok"]
    assert [finding.level for finding in find("redis", ray_address="auto")] == ["ok", "warning"]


def test_a_cluster_that_runs_is_an_error_and_others_are_named() -> None:
    with ClusterDir("blue").hold():
        ClusterDir("blue").write(ClusterState("blue", 1, "http://x", ray_dir="", admin_key="", launch="1"))
        assert [finding.level for finding in find("cluster", cluster="blue")] == ["error"]
        assert find("cluster") == [Finding("ok", "'default' is free; others that run: blue")]


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        (finding,) = find("open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.level == "warning"
    assert "512" in finding.text


def test_rdma_ports_need_unlimited_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "rdma_ports", lambda: ("mlx5_0:1",))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    (finding,) = find("rdma")
    assert finding.level == ("ok" if limit == resource.RLIM_INFINITY else "warning")
    assert "mlx5_0:1" in finding.text


def test_a_machine_without_default_route_is_told_what_ray_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "route"
    routes.write_text("Iface\tDestination\tGateway\neth0\t0000000A\t00000000\n")
    monkeypatch.setattr(checks, "_ROUTES", routes)
    assert "--node-ip-address" in find("ray", host="0.0.0.0")[-1].text
    routes.write_text("Iface\tDestination\tGateway\neth0\t00000000\t0100000A\n")
    assert [finding.level for finding in find("ray", host="0.0.0.0")] == ["ok"]


def test_several_models_are_checked_together() -> None:
    models = [{"name": name, "model": str(tiny.CHECKPOINT)} for name in ("one", "two")]
    findings = find("model", model="", models=models, kv_memory=64 << 20, device="cpu")
    assert [(one.level, "1 combined and 0 prefill workers, beside" in one.text) for one in findings] == [
        ("ok", True)
    ] * 2
    [finding] = find("settings", models=models)
    assert (finding.level, finding.text.split(":")[0]) == ("error", "--model is for one model")
