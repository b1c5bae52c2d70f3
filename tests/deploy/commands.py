"""Reads command lines of processes in manifests, as the processes would."""

from collections.abc import Mapping, Sequence

import pytest
import typer
from typer.testing import CliRunner

from cpd.common.options import command
from cpd.common.settings import PlannerSettings, RouterSettings, SharedSettings, WorkerSettings

_SETTINGS: dict[str, type[SharedSettings]] = {
    "router": RouterSettings,
    "decode_worker": WorkerSettings,
    "prefill_worker": WorkerSettings,
    "deploy.planner": PlannerSettings,
}


def settings_of(
    arguments: Sequence[str], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> SharedSettings:
    """Returns the settings of `python -P -m MODULE …` with these variables of the environment.

    Fails if a variable `CPD_…` names no setting of the process.
    """
    python, *flags, module = arguments[:4]
    assert python.rpartition("/")[2] == "python"
    assert flags == ["-P", "-m"]
    kind = _SETTINGS[module]
    for name, value in environment.items():
        assert name.removeprefix("CPD_").lower() in kind.model_fields or not name.startswith("CPD_"), name
        monkeypatch.setenv(name, value)
    loaded: list[SharedSettings] = []
    app = typer.Typer()
    app.command()(command(kind, loaded.append))
    result = CliRunner().invoke(app, arguments[4:])
    assert result.exit_code == 0, result.output
    (settings,) = loaded
    return settings
