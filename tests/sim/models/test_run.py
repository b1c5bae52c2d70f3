from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from sim.app import app

COMMON = ["models", "--day-s", "60", "--rate", "4"]


def test_a_comparison_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "models.json"
    done = CliRunner().invoke(
        app, [*COMMON, "--seeds", "3,4", "--policies", "rule,lru-swap,static", "--json", str(path)]
    )
    assert done.exit_code == 0, done.output
    assert "no evidence for real hardware" in done.output
    assert "x 1.00" in done.output
    assert "model-12" in done.output
    found = orjson.loads(path.read_bytes())
    assert found["schema"] == "cpd-sim-models/1"
    assert [(one["seed"], one["policy"]) for one in found["outcomes"]] == [
        (seed, policy) for seed in (3, 4) for policy in ("rule", "lru-swap", "static")
    ]
    assert len(found["outcomes"][0]["models"]) == 12


def test_models_of_a_file_have_their_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    models, path = tmp_path / "models.yaml", tmp_path / "models.json"
    models.write_text(
        "- {name: chat, memory: 100GiB, share: 3, fairness: {popular: true}}\n"
        "- {name: rare, memory: 50GiB, share: 1, fairness: {max_wait_time: 2s}, sleep: {idle_timeout: 1m}}\n"
    )
    arguments = [*COMMON, "--devices", "1", "--models-file", str(models), "--policies", "rule", "--seeds", "0"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert done.exit_code == 0, done.output
    chat, rare = orjson.loads(path.read_bytes())["outcomes"][0]["models"]
    # whichever is asked for first: once the popular one is awake, it stays, and the other one fails
    assert (chat["failed"], rare["name"]) == (0, "rare")
    assert rare["failed"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{name: a, memory: 200GiB}]", "a can never be awake: it takes 200.0GiB, and a device has 118.0GiB"),
        ("[{name: a, memory: 1GiB}, {name: a, memory: 2GiB}]", "two models have the name 'a'"),
        ("[{name: a}]", "is not a list of models: 0.memory: Field required"),
        ("[{name: a, memory: 1GiB, fairness: {min_runtime: soon}}]", "not a duration such as"),
        ("[{name: a, memory: 1GiB, fairness: {patience: 1}}]", "0.fairness.patience"),
        ("[{name: a, memory: 1GiB, weights: 2GiB}]", "a has more weights than memory"),
        ("[]", "has no models"),
        ("name: a", "is not a list of models"),
        ("[", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_clear_sentence(tmp_path: Path, content: str, message: str) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(content)
    done = CliRunner().invoke(app, [*COMMON, "--models-file", str(models)])
    assert done.exit_code == 1
    assert message in done.output
    assert done.output.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "rule,best"], "there is no policy 'best'"),
        (["--seeds", "1,x"], "--seeds takes whole numbers"),
        (["--seeds", "-1"], "--seeds takes whole numbers"),
        (["--prompt", "long"], "--prompt: 'long' is not"),
        (["--profile", "/nowhere.json"], "there is no profile"),
        (["--models-file", "/nowhere.yaml"], "cannot read the models of /nowhere.yaml"),
        (["--device-memory", "40GiB"], "model-3 can never be awake"),
    ],
)
def test_wrong_settings_are_one_clear_sentence(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, [*COMMON, *arguments])
    assert done.exit_code == 1
    assert message in done.output
