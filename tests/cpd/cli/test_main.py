import socket
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "run"


def cpd(*arguments: str, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", "from cpd.cli.main import main; main()", *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from cpd.cli.main import app;"
        "heavy = {'torch', 'ray', 'transformers', 'grpc', 'ucxx'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_version_is_shown() -> None:
    assert cpd("--version") == (0, f"cpd {version('cpd')}\n")


def test_the_chart_has_the_version_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "deploy" / "helm" / "cpd" / "Chart.yaml").read_text().splitlines()
    assert {f"version: {package}", f"appVersion: {package}"} <= set(chart)


@pytest.mark.parametrize("command", ["status", "down", "models", "sleep chat", "wake chat", "pin --off chat"])
def test_commands_for_a_running_cluster_need_one(command: str) -> None:
    assert cpd(*command.split()) == (
        1,
        "error: no cluster 'default' is running on this machine; start one with `cpd up`\n",
    )


def test_up_refuses_a_broken_checkpoint_before_it_starts_anything(tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "model").mkdir()
    code, output = cpd("up", "--port", "0", "--model", str(tmp_path / "model"))
    assert code == 1
    assert output.splitlines()[-1].startswith("error: ")
    assert "has no tokenizer.json" in output
    assert not runtime_dir.exists()


@pytest.mark.parametrize("flags", [(), ("--detach",)])
def test_up_refuses_a_port_in_use(flags: tuple[str, ...]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, output = cpd("up", "--port", str(port), *flags)
    assert (code, output) == (1, f"error: port {port} on 127.0.0.1 is in use; choose another with --port\n")


def test_up_refuses_a_redis_that_does_not_answer() -> None:
    code, output = cpd("up", "--port", "0", "--redis-url", "redis://127.0.0.1:1")
    assert code == 1
    assert "error: Redis at redis://127.0.0.1:1 does not answer" in output


def test_up_names_the_profiles_when_one_is_unknown() -> None:
    code, output = cpd("up", "--port", "0", "--simulate", "h100")
    assert (code, output.startswith("error: there is no profile 'h100'")) == (1, True)
    assert "h200-qwen3-8b" in output


def test_profiles_are_found_by_name_in_any_directory(tmp_path: Path) -> None:
    load = ("--workers", "2", "--prefill-workers", "1", "--rate", "20", "--warmup", "0", "--duration", "1")
    code, output = cpd("sim", "run", "--profile", "h200-qwen3-4b", *load, cwd=tmp_path)
    assert code == 0, output
    assert "NVIDIA H200" in output
    assert cpd("profile", "show", "h200-qwen3-4b", cwd=tmp_path)[0] == 0


def test_logs_of_a_cluster_that_never_ran() -> None:
    code, output = cpd("logs", "--cluster", "never")
    assert (code, output.startswith("error: cluster 'never' has no log: there is no ")) == (1, True)
