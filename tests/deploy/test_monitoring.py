"""Prometheus' and Grafana's files, as far as they can be checked without a cluster."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    (alert,) = (one for one in ALERTS if one["alert"] == "CPDNoRouter")
    fires = {"exp_labels": alert["labels"], "exp_annotations": alert["annotations"]}
    at = {"alertname": alert["alert"]}
    series = {"series": f'cpd_policy_fallback{{job="{job}"}}', "values": "0x5 stale"}
    tests = [
        {
            "interval": "1m",
            "input_series": [series],
            "alert_rule_test": [
                {**at, "eval_time": "5m", "exp_alerts": []},
                {**at, "eval_time": "8m", "exp_alerts": [fires]},
            ],
        }
    ]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(PROMETHEUS / "rules.yml")], "tests": tests}))
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
