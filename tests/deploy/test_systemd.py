"""The units for systemd, and whether they agree with the processes."""

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpd.common.process import EXIT_DRAINED, EXIT_SUPERSEDED
from cpd.common.settings import MemberSettings, PlannerSettings, RouterSettings, WorkerSettings
from tests.deploy.commands import settings_of

UNITS = {path.name: path for path in (Path(__file__).resolve().parents[2] / "deploy" / "systemd").glob("*.service")}
MODULES = {
    "cpd-router@.service": "router",
    "cpd-combined@.service": "decode_worker",
    "cpd-prefill@.service": "prefill_worker",
}


def _service(name: str) -> configparser.SectionProxy:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNITS[name])
    return unit["Service"]


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_no_mistake(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = UNITS[name].read_text().replace("/opt/cpd/bin/python", sys.executable)
    unit = tmp_path / name.replace("@", "@0")
    unit.write_text(text)
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", MODULES)
def test_the_processes_accept_their_command_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: /models/m\nhost: 0.0.0.0\n")
    arguments = shlex.split(_service(name)["ExecStart"])
    assert arguments[3] == MODULES[name]
    place = arguments.index("--config") + 1
    assert arguments[place] == ("/etc/cpd/router.yaml" if "router" in name else "/etc/cpd/worker.yaml")
    arguments[place] = str(config)
    given = {"CPD_REDIS_URL": "redis://:password@host", "CPD_ADVERTISE_HOST": "10.1.2.3"}
    settings = settings_of(arguments, given, monkeypatch)
    assert isinstance(settings, RouterSettings | WorkerSettings)
    role = name.removeprefix("cpd-").partition("@")[0]
    own_id = settings.router_id if isinstance(settings, RouterSettings) else settings.worker_id
    assert own_id == f"{role}-%l-%i"
    assert settings.secret_file == Path("${CREDENTIALS_DIRECTORY}/cluster")
    assert _service(name)["LoadCredential"].partition(":")[0] == "cluster"


@pytest.mark.parametrize("name", MODULES)
def test_a_process_that_ended_for_good_is_not_started_again(name: str) -> None:
    service = _service(name)
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"].split() == [str(EXIT_SUPERSEDED), str(EXIT_DRAINED)]


@pytest.mark.parametrize("name", MODULES)
def test_a_process_has_the_time_that_its_drain_takes(name: str) -> None:
    service = _service(name)
    assert int(service["TimeoutStopSec"]) >= MemberSettings.model_fields["drain_s"].default + 10
    assert "KillSignal" not in service, "the default is SIGTERM, which drains"
    assert service["KillMode"] == "mixed"


def test_the_planner_accepts_its_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("planner: act\n")
    arguments = shlex.split(_service("cpd-planner.service")["ExecStart"])
    arguments[arguments.index("/etc/cpd/planner.yaml")] = str(config)
    settings = settings_of(arguments, {"CPD_REDIS_URL": "redis://:password@host"}, monkeypatch)
    assert isinstance(settings, PlannerSettings)
    assert settings.secret_file == Path("${CREDENTIALS_DIRECTORY}/cluster")


def test_both_kinds_of_workers_run_alike() -> None:
    combined, prefill = (UNITS[f"cpd-{role}@.service"].read_text() for role in ("combined", "prefill"))
    assert combined.replace("combined", "prefill").replace("decode_worker", "prefill_worker") == prefill
