import pickle
import sys
from dataclasses import replace

import pytest

from cpd.common.errors import ConfigError
from cpd.common.residency_settings import Fairness, SleepSettings
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


def test_processes_start_alike_if_their_settings_and_secrets_are_equal(specs: dict[str, ProcessSpec]) -> None:
    def router(**changed: object) -> ProcessSpec:
        return processes(ClusterSettings.load({**GIVEN, **changed}), "127.0.0.1")[-1]

    assert router() != specs["router-0"]
    assert router().starts_like(specs["router-0"])
    assert not router(api_key=["key-3"]).starts_like(specs["router-0"])
    assert not router(max_n=2).starts_like(specs["router-0"])


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


SEVERAL = {
    **{name: value for name, value in GIVEN.items() if name not in ("model", "prefill", "combined")},
    "models": [
        {"name": "small", "model": "/models/s", "kv_memory": "1GiB", "prefill": 1},
        {"name": "large", "model": "/models/l", "aliases": ["org/large"], "dtype": "bfloat16", "combined": 2},
    ],
}


def test_each_of_several_models_has_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {spec.name: spec for spec in processes(ClusterSettings.load(SEVERAL), "127.0.0.1")}
    workers = ["small-combined-0", "small-prefill-0", "large-combined-0", "large-combined-1"]
    assert list(several) == [*workers, "router-0"]
    assert [spec.serves for spec in several.values()] == ["small", "small", "large", "large", ""]
    assert several["small-prefill-0"].model == "/models/s"
    small, large = (parse(several[name], WorkerSettings, monkeypatch) for name in workers[1:3])
    assert isinstance(small, WorkerSettings)
    assert isinstance(large, WorkerSettings)
    assert (small.worker_id, small.served_model_name) == ("small-prefill-0", "small")
    assert (small.kv_memory, small.dtype) == (1 << 30, "auto")
    assert (large.kv_memory, large.dtype, large.served_model_name) == (2 << 30, "bfloat16", "large")


def test_the_router_of_several_models_gets_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    router = processes(ClusterSettings.load(SEVERAL), "127.0.0.1")[-1]
    for name, value in router.environment({}).items():
        monkeypatch.setenv(name, value)
    arguments = router.command(router.model)[4:]
    assert "--model" not in arguments
    flags = {name[2:].replace("-", "_"): value for name, value in zip(arguments[::2], arguments[1::2], strict=True)}
    settings = RouterSettings.load(flags)
    assert settings.models == ClusterSettings.load(SEVERAL).models
    assert settings.api_key == ["key-1", "key-2"]


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


def test_workers_on_a_shared_device_get_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {
        **SEVERAL,
        "device_memory": "4GiB",
        "staging_memory": "1GiB",
        "residency": "predicted",
        "sleep": {"idle_timeout": "1m"},
        "models": [{"name": "small", "model": "/models/s", "fairness": {"popular": True, "min_runtime": "3s"}}],
    }
    worker = processes(ClusterSettings.load(shared), "127.0.0.1")[0]
    settings = parse(worker, WorkerSettings, monkeypatch)
    assert isinstance(settings, WorkerSettings)
    assert (settings.device_memory, settings.staging_memory, settings.residency) == (4 << 30, 1 << 30, "predicted")
    assert settings.fairness == Fairness(popular=True, min_runtime_s=3)
    assert settings.sleep == SleepSettings(idle_timeout_s=60)
