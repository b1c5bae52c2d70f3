"""The Helm chart: what it renders, and whether that agrees with the processes."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cpd.common.settings import ClusterSettings, PlannerSettings, RouterSettings, WorkerSettings
from tests.deploy.commands import settings_of
from tests.deploy.helm import CHART, NAMESPACE, RELEASE, container, named, refusal, render
from tests.deploy.helm import helm as helm

ROOT = Path(__file__).resolve().parents[2]
LEAST: dict[str, Any] = {"image": "registry/cpd:1", "model": {"path": "/models/m"}}
ALL: dict[str, Any] = {
    "image": "registry/cpd:1",
    "model": {"path": "/models/m", "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
    "tlsSecret": "endpoint",
    "settings": {"slo-itl": 40, "log-format": "json"},
    "drainSeconds": 45,
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "routers": {
        "env": [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": "key=abc"}],
        "settings": {"slo-ttft": 1500, "policy": {"name": "cost", "gap-weight": 1}, "allowed-hosts": ["llm.example"]},
        "pod": {"nodeSelector": {"disk": "ssd"}},
    },
    "workers": {
        "settings": {"device": "cuda", "kv-checksum": True, "max-queue-tokens": 12_000_000, "host-kv-memory": "8GiB"},
        "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 8, "memory": "64Gi"}},
        "env": [{"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"}],
        "cache": {"hostPath": {"path": "/var/cache/cpd", "type": "Directory"}},
        "pod": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "hostPID": True},
    },
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
}
POD_IP = "10.1.2.3"
DEPLOYMENTS = {f"{RELEASE}-{component}": component for component in ("router", "combined", "prefill")}


@pytest.fixture(params=[LEAST, ALL], ids=["least", "all"])
def manifests(request: pytest.FixtureRequest, helm: Path) -> list[dict[str, Any]]:
    return render(helm, **request.param)


def _environment(deployment: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that a container gets."""
    fields = {"metadata.name": f"{deployment['metadata']['name']}-abc", "status.podIP": POD_IP}
    values = {}
    for variable in container(deployment)["env"]:
        if "value" in variable:
            values[variable["name"]] = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            values[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            values[variable["name"]] = f"redis://:{variable['valueFrom']['secretKeyRef']['key']}@host"
    return values


def _settings(
    manifests: list[dict[str, Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RouterSettings | WorkerSettings:
    """Returns the settings with which the container of a Deployment starts."""
    deployment = named(manifests, "Deployment", name)
    for file, text in named(manifests, "ConfigMap", RELEASE)["data"].items():
        (tmp_path / file).write_text(text)
    arguments = [text.replace("/run/cpd/config", str(tmp_path)) for text in container(deployment)["args"]]
    settings = settings_of(arguments, _environment(deployment), monkeypatch)
    assert isinstance(settings, RouterSettings | WorkerSettings)
    return settings


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def test_workers_request_what_they_are_limited_to(manifests: list[dict[str, Any]]) -> None:
    """Kubernetes takes limits as requests if there are none. If both differ, workers get no cores of their own."""
    for role in ("combined", "prefill"):
        resources = container(named(manifests, "Deployment", f"{RELEASE}-{role}"))["resources"]
        assert resources.get("requests", resources["limits"]) == resources["limits"]


@pytest.mark.parametrize("kubernetes", ["1.27", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("values", [LEAST, ALL], ids=["least", "all"])
def test_every_manifest_is_valid(kubernetes: str, values: dict[str, Any], helm: Path) -> None:
    unknown = set()
    for manifest in render(helm, kubernetes=kubernetes, **values):
        try:
            kubernetes_validate.validate(manifest, kubernetes, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.add((manifest["apiVersion"], manifest["kind"]))
    extensions = {("monitoring.coreos.com/v1", "PodMonitor"), ("keda.sh/v1alpha1", "ScaledObject")}
    assert unknown == (extensions if values is ALL else set())


def test_helm_finds_no_mistake(helm: Path) -> None:
    set_values = ["--set", "image=cpd:1,model.path=/models/m"]
    ran = subprocess.run([helm, "lint", "--strict", CHART, *set_values], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version


def test_the_processes_accept_their_command_lines(
    manifests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DEPLOYMENTS:
        settings = _settings(manifests, name, tmp_path, monkeypatch)
        assert settings.cluster == f"{NAMESPACE}-{RELEASE}"
        assert settings.advertise_host == POD_IP
        assert settings.redis_url == "redis://:redis-url@host"
        own_id = settings.router_id if isinstance(settings, RouterSettings) else settings.worker_id
        assert own_id == f"{name}-abc"


def test_settings_reach_the_processes(helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = render(helm, **ALL)
    router = _settings(manifests, f"{RELEASE}-router", tmp_path, monkeypatch)
    worker = _settings(manifests, f"{RELEASE}-prefill", tmp_path, monkeypatch)
    assert isinstance(router, RouterSettings)
    assert isinstance(worker, WorkerSettings)
    assert (router.slo_itl, router.slo_ttft, router.policy.gap_weight) == (40, 1500, 1)
    assert router.allowed_hosts == ["llm.example"]
    assert (worker.slo_itl, worker.device, worker.kv_checksum) == (40, "cuda", True)
    assert (worker.max_queue_tokens, worker.host_kv_memory) == (12_000_000, 8 << 30)
    assert router.log_format == worker.log_format == "json"
    assert router.drain_s == worker.drain_s == 45


def test_other_services_set_no_setting(helm: Path) -> None:
    """Kubernetes would give the pods CPD_PORT=tcp://… for a Service named cpd."""
    for deployment in (one for one in render(helm, **LEAST, planner="act") if one["kind"] == "Deployment"):
        assert deployment["spec"]["template"]["spec"]["enableServiceLinks"] is False
    assert "invalid propertyName 'enableServiceLinks'" in refusal(
        helm, **LEAST, routers={"pod": {"enableServiceLinks": True}}
    )


def test_pods_listen_where_they_are_told(helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for values, host in ((LEAST, "0.0.0.0"), ({**LEAST, "host": "::"}, "::")):
        manifests = render(helm, **values)
        assert {_settings(manifests, name, tmp_path, monkeypatch).host for name in DEPLOYMENTS} == {host}


def test_routers_and_workers_get_variables(helm: Path) -> None:
    manifests = render(helm, **ALL)
    given = {name: _environment(named(manifests, "Deployment", name)) for name in DEPLOYMENTS}
    assert given[f"{RELEASE}-router"]["OTEL_EXPORTER_OTLP_HEADERS"] == "key=abc"
    assert given[f"{RELEASE}-prefill"]["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert "UCX_NET_DEVICES" not in given[f"{RELEASE}-router"]


def test_ports_agree_with_the_settings(
    manifests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DEPLOYMENTS:
        deployment = named(manifests, "Deployment", name)
        settings = _settings(manifests, name, tmp_path, monkeypatch)
        ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
        if isinstance(settings, RouterSettings):
            assert ports == {"http": settings.port, "admin": settings.admin_port}
        else:
            assert ports == {"grpc": settings.port, "sessions": settings.session_port}
        for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
            for check in ("httpGet", "tcpSocket"):
                asked = container(deployment).get(probe, {}).get(check)
                assert asked is None or asked["port"] in ports
    (service,) = (one for one in manifests if one["kind"] == "Service")
    assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    assert named(manifests, "NetworkPolicy", f"{RELEASE}-router")["spec"]["ingress"][0] == {"ports": [{"port": "http"}]}


def test_probes_speak_tls_where_routers_do(helm: Path) -> None:
    for values, scheme in ((LEAST, "HTTP"), (ALL, "HTTPS")):
        router = container(named(render(helm, **values), "Deployment", f"{RELEASE}-router"))
        assert router["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http", "scheme": scheme}
        assert router["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "admin", "scheme": "HTTPS"}


def test_mounted_files_are_where_the_settings_look(
    manifests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DEPLOYMENTS:
        pod = named(manifests, "Deployment", name)["spec"]["template"]["spec"]
        settings = _settings(manifests, name, tmp_path, monkeypatch)
        mounts = {
            mount["name"]: mount["mountPath"]
            for mount in container(named(manifests, "Deployment", name))["volumeMounts"]
        }
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        secret = {f"{mounts['secret']}/{item['path']}" for item in volumes["secret"]["secret"]["items"]}
        wanted = {settings.secret_file}
        if isinstance(settings, RouterSettings):
            wanted.add(settings.api_key_file)
            assert (settings.tls_cert is None) == ("tls" not in mounts)
            assert settings.tls_cert in (None, Path("/run/cpd/tls/tls.crt"))
        assert {Path(file) for file in secret} == wanted
        assert volumes["secret"]["secret"]["defaultMode"] == 0o440  # for the group of the pod


def test_a_pod_has_the_time_that_its_drain_takes(
    manifests: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, component in DEPLOYMENTS.items():
        deployment = named(manifests, "Deployment", name)
        drain_s = _settings(manifests, name, tmp_path, monkeypatch).drain_s
        hook = container(deployment).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        assert (component == "router") == (hook == ["sleep", "5"])
        assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= drain_s + 10 + int(hook[1])


def test_every_selector_finds_its_pods(manifests: list[dict[str, Any]]) -> None:
    pods = {
        component: named(manifests, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        for name, component in DEPLOYMENTS.items()
    }

    def selected(labels: Mapping[str, str]) -> set[str]:
        return {component for component, of_pod in pods.items() if labels.items() <= of_pod.items()}

    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        if manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert selected(spec["selector"]["matchLabels"]) == {DEPLOYMENTS[name]}
        elif manifest["kind"] == "Service":
            assert selected(spec["selector"]) == {"router"}
        elif manifest["kind"] == "PodMonitor":
            assert selected(spec["selector"]["matchLabels"]) == {"router"}
    everyone, routers = (
        named(manifests, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]
        for name in (RELEASE, f"{RELEASE}-router")
    )
    assert selected(everyone) == set(pods)
    assert selected(routers) == {"router"}


def test_only_the_endpoint_is_open_to_all(helm: Path) -> None:
    manifests = render(helm, **ALL)
    (inside,) = named(manifests, "NetworkPolicy", RELEASE)["spec"]["ingress"]
    assert inside["from"] == [{"podSelector": named(manifests, "NetworkPolicy", RELEASE)["spec"]["podSelector"]}]
    endpoint, metrics = named(manifests, "NetworkPolicy", f"{RELEASE}-router")["spec"]["ingress"]
    assert endpoint == {"ports": [{"port": "http"}]}
    namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert metrics == {"ports": [{"port": "admin"}], "from": [namespace]}
    assert not [one for one in render(helm, **LEAST, networkPolicy=False) if one["kind"] == "NetworkPolicy"]


def test_secrets_are_nowhere_but_in_the_secret(helm: Path) -> None:
    assert "redis" not in str(named(render(helm, **ALL), "ConfigMap", RELEASE))
    for deployment in (one for one in render(helm, **ALL) if one["kind"] == "Deployment"):
        assert not [text for text in _texts(container(deployment)["args"]) if "redis" in text or "key" in text]
    for name in ("redis-url", "redis_url", "api-key", "api_key", "secret-file", "tls-key"):
        for group in ({"settings": {name: "x"}}, {"routers": {"settings": {name: "x"}}}):
            assert f"invalid propertyName '{name}'" in refusal(helm, **LEAST, **group)


def test_values_that_the_chart_does_not_know_are_refused(helm: Path) -> None:
    assert "'replica' not allowed" in refusal(helm, **LEAST, routers={"replica": 3})
    assert "image" in refusal(helm, model={"path": "/models/m"})
    assert "/model/path" in refusal(helm, image="cpd:1")
    assert "invalid propertyName 'volumes'" in refusal(helm, **LEAST, workers={"pod": {"volumes": []}})
    assert "invalid propertyName 'port'" in refusal(helm, **LEAST, workers={"settings": {"port": 1}})
    assert "needs monitoring.enabled" in refusal(helm, **LEAST, autoscaling={"enabled": True})


def test_the_chart_leaves_only_its_own_settings_out(helm: Path) -> None:
    """Every other setting of a router or worker can be given."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    own = re.compile(schema["definitions"]["settings"]["propertyNames"]["not"]["pattern"])
    names = {*RouterSettings.model_fields, *WorkerSettings.model_fields}
    excluded = {name for name in names if own.match(name)}
    assert {name for name in names if own.match(name.replace("_", "-"))} == excluded
    secret = {"api_key", "redis_url"}
    ids = {"router_id", "worker_id"}
    ports = {"host", "port", "admin_port", "session_port", "advertise_host"}
    files = {"secret_file", "api_key_file", "tls_cert", "tls_key"}
    assert excluded == secret | ids | ports | files | {"cluster", "model", "drain_s"}


def test_keys_are_optional(helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = render(helm, **LEAST, apiKeys=False, monitoring={"enabled": True})
    settings = _settings(manifests, f"{RELEASE}-router", tmp_path, monkeypatch)
    assert isinstance(settings, RouterSettings)
    assert settings.api_key_file is None
    (endpoint,) = named(manifests, "PodMonitor", RELEASE)["spec"]["podMetricsEndpoints"]
    assert "authorization" not in endpoint


def test_prometheus_scrapes_the_admin_ports(helm: Path) -> None:
    monitor = named(render(helm, **ALL), "PodMonitor", RELEASE)
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["podMetricsEndpoints"] == [
        {
            "port": "admin",
            "scheme": "https",
            "honorLabels": True,
            "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "router"}],
            "tlsConfig": {"insecureSkipVerify": True},
            "authorization": {"credentials": {"name": "cpd", "key": "operator-key"}},
        }
    ]


def test_keda_scales_the_workers_by_metrics_that_exist(helm: Path) -> None:
    manifests = render(helm, **ALL)
    documented = set(re.findall(r"`(cpd_[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for component in ("combined", "prefill"):
        scaled = named(manifests, "ScaledObject", f"{RELEASE}-{component}")["spec"]
        deployment = named(manifests, "Deployment", scaled["scaleTargetRef"]["name"])
        assert "replicas" not in deployment["spec"], "Helm would set the number back"
        assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 4)
        (trigger,) = scaled["triggers"]
        assert trigger["type"] == "prometheus"
        metadata = trigger["metadata"]
        assert all(isinstance(value, str) for value in metadata.values())
        assert metadata.keys() == {"serverAddress", "query", "threshold", "ignoreNullValues"}
        metrics = set(re.findall(r"cpd_[a-z_]+", metadata["query"]))
        assert metrics
        assert metrics <= documented
        assert set(re.findall(r'(\w+)="([^"]+)"', metadata["query"])) == {
            ("job", f"{NAMESPACE}/{RELEASE}"),  # that of the PodMonitor
            ("role", component),
        }
    assert named(render(helm, **LEAST), "Deployment", f"{RELEASE}-combined")["spec"]["replicas"] == 1


def test_keda_starts_no_prefill_workers_if_there_are_to_be_none(helm: Path) -> None:
    manifests = render(helm, **ALL, prefill={"replicas": 0})
    assert named(manifests, "Deployment", f"{RELEASE}-prefill")["spec"]["replicas"] == 0
    (scaled,) = (one for one in manifests if one["kind"] == "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"] == {"name": f"{RELEASE}-combined"}
    assert "replicas" not in named(manifests, "Deployment", f"{RELEASE}-combined")["spec"]


def test_a_planner_runs_if_it_is_wanted(helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = render(helm, **LEAST, planner="act", settings={"slo-itl": 40, "log-format": "json"})
    planner = named(manifests, "Deployment", f"{RELEASE}-planner")
    kubernetes_validate.validate(planner, kubernetes_validate.latest_version(), strict=True)
    config = tmp_path / "planner.yaml"
    config.write_text(named(manifests, "ConfigMap", RELEASE)["data"]["planner.yaml"])
    arguments = [text.replace("/run/cpd/config", str(tmp_path)) for text in container(planner)["args"]]
    settings = settings_of(arguments, _environment(planner), monkeypatch)
    assert isinstance(settings, PlannerSettings)
    assert (settings.cluster, settings.planner, settings.log_format) == (f"{NAMESPACE}-{RELEASE}", "act", "json")
    assert settings.redis_url == "redis://:redis-url@host"
    assert settings.secret_file == Path("/run/cpd/secret/cluster")
    inside = named(manifests, "NetworkPolicy", RELEASE)["spec"]["podSelector"]["matchLabels"]
    assert inside.items() <= planner["spec"]["template"]["metadata"]["labels"].items()
    assert not [one for one in render(helm, **LEAST) if one["metadata"]["name"] == f"{RELEASE}-planner"]
    assert render(helm, **LEAST, planner=False) == render(helm, **LEAST)  # `off` without quotes
    assert "work against each other" in refusal(helm, **{**ALL, "planner": "act"})
    assert named(render(helm, **{**ALL, "planner": "advise"}), "Deployment", f"{RELEASE}-planner")


def test_the_compose_file_is_valid() -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    file = ROOT / "deploy" / "compose.yaml"
    ran = subprocess.run([sys.executable, "-m", "check_jsonschema", *schema, file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_the_compose_file_passes_settings_that_exist() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    command = services["head"]["command"][-1]
    flags = re.findall(r"--([a-z-]+)", command[command.index("cpd up") :])
    variables = re.findall(r"CPD_([A-Z_]+)=", command)
    assert {name.replace("-", "_") for name in flags} | {name.lower() for name in variables} <= set(
        ClusterSettings.model_fields
    )
    assert "redis_url" not in flags
    assert services["head"]["ports"] == [f"127.0.0.1:8000:{ClusterSettings.model_fields['port'].default}"]
