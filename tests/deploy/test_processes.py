import pickle
import sys
from dataclasses import replace

import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings, RouterSettings, Settings, SimulatedSettings, WorkerSettings
from deploy.processes import ProcessSpec, processes
from tests.secret import SECRET, secret_file

GIVEN = {
    "model": "/models/m",
    "prefill": 2,
    "combined": 1,
    "cluster": "blue",
    "host": "0.0.0.0",
    "port": 8080,
    "redis_url": "redis://:redis-secret@r",
    "secret_file": str(secret_file()),
    "api_key": ["key-1", "key-2"],
    "kv_memory": "2GiB",
    "long_prefill_tokens": 64,
    "lease_s": 2.5,
}


@pytest.fixture
def specs() -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in processes(ClusterSettings.load(GIVEN), "127.0.0.1")}


def parse(spec: ProcessSpec, settings: type[Settings], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Parses the process's arguments and environment as the process does."""
    for name, value in spec.environment({}).items():
        monkeypatch.setenv(name, value)
    arguments = spec.command("/here/m")[4:]
    flags = {name[2:].replace("-", "_"): value for name, value in zip(arguments[::2], arguments[1::2], strict=True)}
    return settings.load(flags)


def test_there_is_one_process_for_each_worker_and_router(specs: dict[str, ProcessSpec]) -> None:
    assert list(specs) == ["combined-0", "prefill-0", "prefill-1", "router-0"]
    assert specs["prefill-1"].command("m")[:5] == [sys.executable, "-P", "-m", "prefill_worker", "--model"]


def test_a_worker_gets_its_settings(specs: dict[str, ProcessSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse(specs["prefill-1"], WorkerSettings, monkeypatch)
    assert isinstance(settings, WorkerSettings)
    assert settings.worker_id == "prefill-1"
    assert settings.model == "/here/m"
    assert settings.cluster == "blue"
    assert (settings.host, settings.port) == ("127.0.0.1", 0)
    assert settings.kv_memory == 2 << 30
    assert settings.lease_s == 2.5
    assert settings.secret_file == secret_file()


def test_a_router_gets_its_settings(specs: dict[str, ProcessSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse(specs["router-0"], RouterSettings, monkeypatch)
    assert isinstance(settings, RouterSettings)
    assert settings.router_id == "router-0"
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)
    assert settings.api_key == ["key-1", "key-2"]
    assert settings.long_prefill_tokens == 64
    assert settings.redis_url == "redis://:redis-secret@r"


def test_simulated_workers_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClusterSettings.load({**GIVEN, "simulate": "/profiles/p.json"})
    workers, router = processes(settings, "127.0.0.1")
    assert (workers.name, workers.kind, workers.is_worker) == ("simulated", "simulated", True)
    assert workers.members == ("combined-0", "prefill-0", "prefill-1")
    assert (router.name, router.members) == ("router-0", ("router-0",))
    parsed = parse(workers, SimulatedSettings, monkeypatch)
    assert isinstance(parsed, SimulatedSettings)
    assert (parsed.simulate, parsed.prefill, parsed.combined) == ("/profiles/p.json", 2, 1)
    assert parsed.host == "127.0.0.1"


def test_a_process_is_ready_when_it_holds_all_its_leases() -> None:
    workers, _ = processes(ClusterSettings.load({**GIVEN, "simulate": "instant"}), "127.0.0.1")
    assert workers.has_leases(7, {"combined-0": 7, "prefill-0": 7, "prefill-1": 7, "router-0": 8})
    assert not workers.has_leases(7, {"combined-0": 7, "prefill-0": 7, "prefill-1": 6})
    assert not workers.has_leases(7, {"combined-0": 7, "prefill-0": 7})
    assert not workers.has_leases(None, {})


def test_routers_listen_where_the_settings_say(specs: dict[str, ProcessSpec]) -> None:
    assert specs["router-0"].listens_on == ("blue", "0.0.0.0", 8080)
    *_, router = processes(ClusterSettings.load({"model": "m", "secret_file": str(secret_file())}), "127.0.0.1")
    assert router.listens_on == ("default", "127.0.0.1", 8000)


def test_secrets_are_neither_on_command_lines_nor_in_what_goes_through_ray(specs: dict[str, ProcessSpec]) -> None:
    for spec in specs.values():
        shown = " ".join(spec.command("m")) + repr(spec)
        sent = pickle.dumps(spec)  # as Ray does
        for secret in (SECRET, "redis-secret", "key-1"):
            assert secret not in shown
            assert secret.encode() not in sent


def test_a_machine_with_another_secret_says_so(specs: dict[str, ProcessSpec]) -> None:
    spec = replace(specs["router-0"], flags={"secret_file": str(secret_file("another secret than that"))})
    with pytest.raises(ConfigError, match="has another secret on this machine"):
        spec.environment({})


def test_the_child_does_not_inherit_our_variables(specs: dict[str, ProcessSpec]) -> None:
    inherited = {"PATH": "/bin", "CPD_PORT": "1", "RAY_AUTH_TOKEN": "t", "OMP_NUM_THREADS": "1"}
    environment = specs["combined-0"].environment(inherited)
    assert environment["PATH"] == "/bin"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["CPD_REDIS_URL"] == "redis://:redis-secret@r"
    assert not {"CPD_PORT", "RAY_AUTH_TOKEN", "OMP_NUM_THREADS", "CPD_API_KEY"} & set(environment)
