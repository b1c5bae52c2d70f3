"""The `cpd` command with a real Ray: up, harmed, down. Ray takes seconds to start, so one cluster sees most of it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import pytest

from deploy.endpoint import pick_port
from deploy.raydir import clear_ray_dir
from models import tiny
from tests.e2e.cluster import eventually

pytestmark = pytest.mark.e2e

PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
UP_S, DOWN_S = 100.0, 60.0


class Command:
    """Runs `cpd` with a runtime directory of its own, and finds every process that comes of it."""

    def __init__(self, directory: Path) -> None:
        self._mark = f"STARTED_BY_TEST={uuid4().hex}"
        name, value = self._mark.split("=")
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory), name: value}
        self._errors = directory / "errors"
        self._before = _leftovers()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `cpd up`."""
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [*PROGRAM, "up", "--port", "0", "--model", str(tiny.CHECKPOINT), "--kv-memory", "64MiB", *arguments],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # of which it is the one process group, as in a terminal
            )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output."""
        done = subprocess.run([*PROGRAM, *arguments], env=self._environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def errors(self) -> str:
        """What `cpd up` has printed beside its result."""
        return self._errors.read_text()

    def processes(self) -> dict[int, str]:
        """Command lines of everything that was started."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended
                pass
        return found

    def find(self, program: str) -> int:
        """The process whose command line begins with a program of this name."""
        (pid,) = (pid for pid, line in self.processes().items() if program in line[: line.find(" ") + 1])
        return pid

    def assert_nothing_is_left(self, port: int | None = None) -> None:
        """No process, port, shared memory or directory."""
        eventually(lambda: not self.processes(), f"nothing is left of {self.processes()}", DOWN_S)
        assert _leftovers() <= self._before
        assert not (self._errors.parent / "cpd").exists()
        if port:
            assert pick_port("127.0.0.1", port) == port


def _leftovers() -> set[str]:
    return {*os.listdir("/dev/shm"), *(name for name in os.listdir("/tmp") if name.startswith("cpd-ray-"))}


@pytest.fixture
def command() -> Iterator[Command]:
    directory = Path(tempfile.mkdtemp(prefix="cpd-e2e-", dir="/tmp"))  # sockets need short names
    made = Command(directory)
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)
    for state in directory.glob("cpd/*/state.json"):
        clear_ray_dir(json.loads(state.read_bytes())["ray_dir"])
    shutil.rmtree(directory)


def test_a_cluster_comes_up_heals_and_goes_down(command: Command) -> None:
    up = command.start("--long-prefill-tokens", "64", "--served-model-name", "tiny", "--log-level", "warning")
    assert up.stdout is not None
    banner = [up.stdout.readline() for _ in range(6)]
    assert banner[0].startswith("Serving tiny at http://127.0.0.1:"), command.errors()
    url = banner[0].split()[-1]
    port = int(url.split(":")[-1])

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        def ask(words: int) -> tuple[str, str]:
            raw = client.completions.with_raw_response.create(
                model="tiny", prompt="copper door " * words, max_tokens=8, temperature=0
            )
            return raw.parse().choices[0].text, raw.headers["x-cpd-route"]

        short, long = ask(3), ask(150)
        assert (short[1], long[1]) == ("local", "remote")

        code, output = command.run("up", "--port", "0")
        assert (code, "is running already" in output) == (1, True)
        code, output = command.run("status")
        assert code == 0
        assert all(name in output for name in ("combined-0", "prefill-0", "ready")), output
        code, output = command.run("trace")
        assert code == 0, output
        steps = [json.loads(line) for line in output.splitlines()]
        assert {step["worker"] for step in steps if step["prefill_tokens"]} == {"combined-0", "prefill-0"}
        assert {step["worker"] for step in steps if step["decodes"]} == {"combined-0"}
        code, output = command.run("trace", "--chrome", "--worker", "combined-0", "--seconds", "600")
        assert (code, bool(json.loads(output)["traceEvents"])) == (0, True)
        code, output = command.run("trace", "--worker", "nobody")
        assert (code, "there are: combined-0, prefill-0" in output) == (1, True)

        for victim in ("worker", "supervisor"):
            before = combined_worker(command)
            pid = before["pid"] if victim == "worker" else parent(before["pid"])
            os.kill(pid, signal.SIGKILL)

            def healed(old: int = before["pid"]) -> bool:
                now = combined_worker(command)
                return bool(now and now["pid"] != old and now["state"] == "ready")

            eventually(healed, f"the cluster is whole after its {victim} was killed")
            assert ask(3) == short
            assert ask(150) == long

    code, output = command.run("down")
    assert (code, output) == (0, "Cluster 'default' is down.\n")
    assert up.wait(DOWN_S) == 0
    up.stdout.close()
    command.assert_nothing_is_left(port)
    assert command.run("status")[0] == 1


def test_a_simulated_cluster_comes_up_says_so_and_ends_with_its_terminal(command: Command, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny.CHECKPOINT, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20}')
    flags = ("--simulate", "instant", "--prefill", "2", "--combined", "4", "--log-level", "warning")
    up = command.start("--model", str(model), *flags)
    assert up.stdout is not None
    url = up.stdout.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:"), command.errors()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        assert client.completions.create(model=name, prompt="fox " * 9, max_tokens=8).usage
    assert "generation_config.json says: temperature 0.5, top_k 20" in command.errors()
    code, output = command.run("status")
    assert (code, "combined-3" in output, "prefill-1" in output, "simulated" in output) == (0, True, True, True)
    assert "simulated" in command.errors()
    os.killpg(up.pid, signal.SIGHUP)  # as a closed terminal and some service managers do, not to the process alone
    assert up.wait(DOWN_S) == 0
    up.stdout.close()
    command.assert_nothing_is_left(int(url.split(":")[-1]))


def test_requests_outlive_rays_gcs_and_the_command_ends_with_its_raylet(command: Command) -> None:
    up = command.start("--simulate", "instant", "--prefill", "0", "--log-level", "warning")
    assert up.stdout is not None
    url = up.stdout.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:"), command.errors()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        os.kill(command.find("/gcs_server "), signal.SIGKILL)
        eventually(lambda: "gcs_server died. The cluster goes on" in command.errors(), "it is said")
        assert client.completions.create(model=model, prompt="fox " * 9, max_tokens=8).usage
    assert up.poll() is None
    os.kill(command.find("/raylet/raylet "), signal.SIGKILL)
    assert up.wait(DOWN_S) == 1
    up.stdout.close()
    last = command.errors().strip().splitlines()[-1]
    assert last == "error: Ray's raylet died, and the cluster with it; start it again"
    command.assert_nothing_is_left(int(url.split(":")[-1]))


def test_a_process_that_refuses_to_start_ends_the_command_with_its_sentence(command: Command) -> None:
    port = pick_port("127.0.0.1", 0)
    with command.start("--prefill", "0", "--port", str(port)) as up, socket.socket() as other:
        eventually(lambda: any("raylet" in line for line in command.processes().values()), "Ray is starting")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))  # somebody takes the port after it was found to be free
        other.listen()
        assert up.wait(UP_S) == 1
    last = command.errors().strip().splitlines()[-1]
    assert (
        last == f"error: router-0 on {socket.gethostname()}: can't listen on 127.0.0.1:{port}: Address already in use"
    )
    command.assert_nothing_is_left()


def test_ctrl_c_while_it_starts_takes_everything_down(command: Command) -> None:
    with command.start() as up:
        eventually(lambda: any("raylet" in line for line in command.processes().values()), "Ray is starting")
        os.killpg(up.pid, signal.SIGINT)
        assert up.wait(DOWN_S) == 0
    command.assert_nothing_is_left()


def combined_worker(command: Command) -> dict[str, Any]:
    """The combined worker in `cpd status --json`; empty while there is none."""
    code, output = command.run("status", "--json")
    assert code == 0, output
    workers: dict[str, dict[str, Any]] = {worker["id"]: worker for worker in json.loads(output)["workers"]}
    return workers.get("combined-0", {})


def parent(pid: int) -> int:
    """Process id of the supervisor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
