"""What deploy/prometheus and deploy/grafana contain."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "cpd.json").read_text())
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]
]

_METRIC = re.compile(r"\b(?:cpd_|vllm:|process_)\w+")


def queries() -> dict[str, str]:
    """The dashboard's queries, by panel and legend."""
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"].replace("$__rate_interval", "1m")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
    }


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in a query, but for Prometheus' own."""
    return set(_METRIC.findall(expression))
