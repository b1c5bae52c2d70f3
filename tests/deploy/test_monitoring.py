"""Prometheus' and Grafana's files, as far as they can be checked without a cluster."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.request_metrics import RequestMetrics, RouterMetrics
from tests.deploy.monitoring import ALERTS, DASHBOARD, DEPLOY, PROMETHEUS, queries
from tests.programs import needs_prometheus

OPERATIONS = DEPLOY.parent / "docs" / "operations.md"


def test_each_alert_has_a_run_book() -> None:
    headings = set(re.findall(r"^#+ (.+)$", OPERATIONS.read_text(), re.MULTILINE))
    for alert in ALERTS:
        assert alert["alert"] in headings
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning")


def test_each_run_book_has_an_alert() -> None:
    described = re.findall(r"^### (CPD\w+)$", OPERATIONS.read_text(), re.MULTILINE)
    assert described == [alert["alert"] for alert in ALERTS]


@needs_prometheus
@pytest.mark.parametrize(("kind", "file"), [("config", "prometheus.yml"), ("rules", "rules.yml")])
def test_promtool_finds_no_mistake(kind: str, file: str) -> None:
    ran = subprocess.run(["promtool", "check", kind, PROMETHEUS / file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_prometheus
@pytest.mark.parametrize("job", ["cpd", "serving/chat"])  # by prometheus.yml, and by a PodMonitor of the chart
def test_no_router_is_noticed_whatever_the_job(job: str, tmp_path: Path) -> None:
    series = {f'cpd_policy_fallback{{job="{job}"}}': "0x5 stale"}
    _check_alert("CPDNoRouter", series, {5: False, 8: True}, tmp_path)


@needs_prometheus
def test_a_worker_that_is_lost_is_noticed_but_not_one_that_stood_in_for_others(tmp_path: Path) -> None:
    lost = {_live("combined-0"): "1x200", _live("combined-1"): "1x100 stale"}
    _check_alert("CPDWorkersMissing", lost, {100: False, 115: True, 155: True, 200: False}, tmp_path)
    restart = {_live("combined-0"): "1x100 stale 1x99", _live("combined-1"): "_x95 1x15 stale"}
    _check_alert("CPDWorkersMissing", restart, {110: False, 125: False, 140: False, 165: False}, tmp_path)


@needs_prometheus
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("CPDErrors", "internal_error"),
        ("CPDErrors", "service_unavailable"),
        ("CPDErrors", "wake_failed"),
        ("CPDQueuesFull", "wait_too_long"),
    ],
)
def test_calls_that_fail_by_the_fault_of_the_cluster_are_noticed(name: str, code: str, tmp_path: Path) -> None:
    _check_alert(name, {f'cpd_request_errors_total{{code="{code}"}}': "0x10 60+60x20"}, {8: False, 20: True}, tmp_path)
    _check_alert(name, {'cpd_request_errors_total{code="invalid_value"}': "0+60x30"}, {20: False}, tmp_path)


def test_errors_with_an_alert_are_counted_from_0() -> None:
    text = RouterMetrics().text().decode()
    expressions = " ".join(alert["expr"] for alert in ALERTS)
    codes = "|".join(re.findall(r'cpd_request_errors_total\s*{code=~?"(.*?)"}', expressions)).split("|")
    assert len(codes) == 5
    for code in codes:
        assert f'cpd_request_errors_total{{code="{code}"}} 0.0' in text


def test_limits_of_alerts_are_bounds_of_buckets() -> None:
    """Between two bounds a quantile is a guess: all values just above the lower one would look like some far above."""
    router = RouterMetrics()
    requests = RequestMetrics(router)
    requests.ttft("local").observe(1.0)
    requests.itl.observe(0.01)
    text = router.text().decode()
    limits = [
        match.groups()
        for alert in ALERTS
        if (match := re.search(r"^histogram_quantile.*rate\((\w+)\[.*> ([0-9.]+)$", alert["expr"]))
    ]
    assert len(limits) == 2
    for metric, limit in limits:
        assert f'{metric}{{le="{float(limit)}"' in text


def _live(worker: str) -> str:
    return f'cpd_worker_live{{role="combined", router="router-0", worker="{worker}"}}'


def _check_alert(name: str, series: dict[str, str], fires: dict[int, bool], tmp_path: Path) -> None:
    """Asserts at which minutes an alert fires, while series with a value a minute have these values."""
    (alert,) = (one for one in ALERTS if one["alert"] == name)
    annotations = {key: re.sub(r"{{ \$value.*?}}", "1", text) for key, text in alert["annotations"].items()}
    fired = [{"exp_labels": alert["labels"], "exp_annotations": annotations}]
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "alert_rule_test": [
            {"alertname": name, "eval_time": f"{minute}m", "exp_alerts": fired if fires_then else []}
            for minute, fires_then in fires.items()
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(PROMETHEUS / "rules.yml")], "tests": [test]}))
    ran = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_panels_do_not_overlap_and_have_queries() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert bool(panel.get("targets")) == (panel["type"] != "row"), panel["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(queries()) == sum(len(panel.get("targets", [])) for panel in DASHBOARD["panels"])


def test_the_dashboard_asks_the_source_that_is_provisioned() -> None:
    (source,) = _read("provisioning/datasources/prometheus.yaml")["datasources"]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"} == {source["uid"]}


def test_compose_mounts_what_grafana_and_prometheus_read() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = {
        name: dict(volume.removesuffix(":ro").split(":") for volume in services[name]["volumes"])
        for name in ("prometheus", "grafana")
    }
    for of_service in mounts.values():
        for source in of_service:
            assert (DEPLOY.parent / source).is_dir()
    (provider,) = _read("provisioning/dashboards/cpd.yaml")["providers"]
    assert mounts["grafana"]["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["prometheus"]["./deploy/prometheus"] == "/etc/prometheus"
    assert all(services[name]["profiles"] == ["monitoring"] for name in mounts)
    (source,) = _read("provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert job["http_sd_configs"][0]["url"].split("/")[2] == f"head:{services['head']['ports'][0].split(':')[-1]}"


def _read(file: str) -> Any:
    return yaml.safe_load((DEPLOY / "grafana" / file).read_text())
