"""`cpd profile …` through the command line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cpd.cli.main import app


def profile(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["profile", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--model", "/nonexistent"], ["show", "/nonexistent.json"], ["split", "--profile", "/nonexistent.json"]],
)
def test_a_missing_profile_is_one_sentence(arguments: list[str]) -> None:
    code, _, errors = profile(*arguments)
    assert code == 1
    assert errors.startswith("error: ")
    assert "/nonexistent" in errors
    assert errors.count("\n") == 1


def test_a_damaged_profile_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text('{"schema": "something else"}')
    for arguments in (["show", str(file)], ["split", "--profile", str(file)]):
        code, _, errors = profile(*arguments)
        assert code == 1
        assert errors.count("\n") == 1
        assert "is not a profile" in errors


def test_a_subcommand_does_not_measure(tmp_path: Path) -> None:
    code, _, _ = profile("show", str(tmp_path / "profile.json"))
    assert code == 1
    assert not Path("profile.json").exists()


def test_help_of_the_budget_sweep_lists_its_load() -> None:
    code, output, _ = profile("budget", "--help")
    assert code == 0
    assert "--decodes" in output
