from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cpd.common.errors import ConfigError
from cpd.common.options import command
from cpd.common.settings import ClusterSettings


@pytest.fixture
def invoke() -> "Invoke":
    return Invoke()


class Invoke:
    """Runs a command that takes ClusterSettings, and returns the settings it got."""

    def __init__(self) -> None:
        self.given: ClusterSettings | None = None

    def __call__(self, *arguments: str) -> tuple[int, str]:
        def run(settings: ClusterSettings) -> None:
            """Does it."""
            self.given = settings
            if settings.cluster == "broken":
                raise ConfigError("the cluster is broken")

        app = typer.Typer(rich_markup_mode=None)
        app.command()(command(ClusterSettings, run))
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, result.output


def test_every_setting_is_a_flag(invoke: Invoke) -> None:
    code, output = invoke("--help")
    assert code == 0
    for name in ClusterSettings.model_fields:
        assert f"--{name.replace('_', '-')} " in output
    assert "--config" in output


def test_flags_reach_the_command(invoke: Invoke) -> None:
    code, _ = invoke("--port", "9000", "--kv-memory", "3GiB", "--api-key", "a", "--api-key", "b", "--lease-s", "2.5")
    assert code == 0
    assert invoke.given is not None
    assert (invoke.given.port, invoke.given.kv_memory, invoke.given.lease_s) == (9000, 3 << 30, 2.5)
    assert invoke.given.api_key == ["a", "b"]


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("64", 64)])
def test_a_setting_may_take_a_number_or_a_word(invoke: Invoke, text: str, value: int | str) -> None:
    assert invoke("--long-prefill-tokens", text)[0] == 0
    assert invoke.given is not None
    assert invoke.given.long_prefill_tokens == value


def test_other_values_than_the_number_or_word_are_one_sentence(invoke: Invoke) -> None:
    code, output = invoke("--long-prefill-tokens", "much")
    assert code == 1
    assert "long-prefill-tokens" in output


def test_the_file_is_read(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 9000\nprefill: 0\n")
    assert invoke("--config", str(file), "--prefill", "2")[0] == 0
    assert invoke.given is not None
    assert (invoke.given.port, invoke.given.prefill) == (9000, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--cluster", "broken"), 1, "error: the cluster is broken"),
        (("--combined", "0"), 1, "error: combined: Input should be greater than or equal to 1"),
        (("--port", "http"), 2, "'--port'"),
        (("--no-such", "1"), 2, "--no-such"),
    ],
)
def test_errors_are_one_sentence(invoke: Invoke, arguments: tuple[str, ...], code: int, message: str) -> None:
    result, output = invoke(*arguments)
    assert result == code
    assert message in output
    assert "Traceback" not in output
