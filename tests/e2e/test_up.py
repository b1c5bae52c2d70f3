"""The `cpd` command with a real Ray. Ray takes seconds to start, so one cluster serves most of the checks."""

import contextlib
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
from redis import Redis

from deploy.endpoint import pick_port
from deploy.raydir import clear_ray_dir
from models import tiny
from tests.e2e.cluster import eventually
from tests.ports import free_port

pytestmark = pytest.mark.e2e

PROGRAM = [sys.executable, "-c", "from cpd.cli.main import main; main()"]
UP_S, DOWN_S, CHANGE_S = 100.0, 60.0, 300.0


class Command:
    """Runs `cpd` with its own runtime directory, and finds every process that it starts."""

    def __init__(self, directory: Path) -> None:
        self._mark = f"STARTED_BY_TEST={uuid4().hex}"
        name, value = self._mark.split("=")
        self._environment = {
            **os.environ,
            "CPD_RUNTIME_DIR": str(directory / "cpd"),
            "XDG_STATE_HOME": str(directory / "state"),
            name: value,
        }
        self.directory = directory
        self._errors = directory / "errors"
        self._before = _shared_files()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `cpd up`."""
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [*PROGRAM, "up", "--port", "0", "--model", str(tiny.CHECKPOINT), "--kv-memory", "64MiB", *arguments],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # a process group of its own, as in a terminal
            )

    def run(self, *arguments: str, seconds: float = UP_S) -> tuple[int, str]:
        """Runs a `cpd` command; returns its exit code and output."""
        done = subprocess.run(
            [*PROGRAM, *arguments], env=self._environment, capture_output=True, text=True, timeout=seconds
        )
        return done.returncode, done.stdout + done.stderr

    def open(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts a `cpd` command whose output is read while it runs."""
        return subprocess.Popen([*PROGRAM, *arguments], env=self._environment, stdout=subprocess.PIPE, text=True)

    def find_worker(self, name: str) -> int:
        """Process id of a worker."""
        (pid,) = (pid for pid, line in self.processes().items() if f"--worker-id {name} " in line)
        return pid

    def find_router(self, index: int) -> int | None:
        """Process id of a router; None if it does not run."""
        running = (pid for pid, line in self.processes().items() if f"--router-id router-{index} " in line)
        return next(running, None)

    def launcher(self) -> int:
        """Process id of the running `cpd up`."""
        pid: int = json.loads((self._errors.parent / "cpd/default/state.json").read_bytes())["pid"]
        return pid

    def errors(self) -> str:
        """Standard error of `cpd up`."""
        return self._errors.read_text()

    def processes(self) -> dict[int, str]:
        """Command lines of all processes that were started, by process id."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # the process has just ended
                pass
        return found

    def find(self, program: str) -> int:
        """Process id of the process whose program has this name."""
        (pid,) = (pid for pid, line in self.processes().items() if program in line[: line.find(" ") + 1])
        return pid

    def assert_nothing_is_left(self, port: int | None = None) -> None:
        """Checks that no process, port, shared memory or directory is left."""
        eventually(lambda: not self.processes(), f"nothing is left of {self.processes()}", DOWN_S)
        eventually(lambda: not self._leftovers(), f"{self._leftovers()} is deleted", DOWN_S)
        assert not (self._errors.parent / "cpd").exists()
        if port:
            assert pick_port("127.0.0.1", port) == port

    def _leftovers(self) -> set[str]:
        """New shared memory and Ray directories, except those that a process uses: another cluster of this machine."""
        if not (new := _shared_files() - self._before):
            return set()
        in_use = _files_in_use()
        return {path for path in new if path not in in_use}


def _shared_files() -> set[str]:
    return {str(path) for path in (*Path("/dev/shm").iterdir(), *Path("/tmp").glob("cpd-ray-*"))}


def _files_in_use() -> str:
    """The paths of all files that processes have open or mapped, one a line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            found.append((process / "maps").read_text())
            found += [os.readlink(link) for link in (process / "fd").iterdir()]
    return "\n".join(found)


@contextlib.contextmanager
def started_command() -> Iterator[Command]:
    """The command with a directory of its own; in the end nothing that it has started is left."""
    directory = Path(tempfile.mkdtemp(prefix="cpd-e2e-", dir="/tmp"))  # sockets need short names
    made = Command(directory)
    try:
        yield made
    finally:
        for pid in made.processes():
            os.kill(pid, signal.SIGKILL)
        for state in directory.glob("cpd/*/state.json"):
            clear_ray_dir(json.loads(state.read_bytes())["ray_dir"])
        shutil.rmtree(directory)


@pytest.fixture
def command() -> Iterator[Command]:
    with started_command() as made:
        yield made


def test_up_serves_and_restarts_dead_processes_and_down_ends_everything(command: Command) -> None:
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
        *documents, said = output.splitlines()
        assert f"{len(documents)} steps of 2 workers" in said
        steps = [json.loads(line) for line in documents]
        assert {step["worker"] for step in steps if step["prefill_tokens"]} == {"combined-0", "prefill-0"}
        assert {step["worker"] for step in steps if step["decodes"]} == {"combined-0"}
        code, output = command.run("trace", "--chrome", "--worker", "combined-0", "--seconds", "600")
        document, said = output.splitlines()
        assert (code, bool(json.loads(document)["traceEvents"]), "ui.perfetto.dev" in said) == (0, True, True)
        code, output = command.run("trace", "--worker", "nobody")
        assert (code, "there are: combined-0, prefill-0" in output) == (1, True)

        for victim in ("worker", "supervisor"):
            before = combined_worker(command)
            pid = before["pid"] if victim == "worker" else parent(before["pid"])
            os.kill(pid, signal.SIGKILL)

            def is_healthy(old: int = before["pid"]) -> bool:
                now = combined_worker(command)
                return bool(now and now["pid"] != old and now["state"] == "ready")

            eventually(is_healthy, f"the cluster is healthy after its {victim} was killed")
            assert ask(3) == short
            assert ask(150) == long

    code, output = command.run("down")
    assert (code, output) == (0, "Cluster 'default' is down.\n")
    assert up.wait(DOWN_S) == 0
    up.stdout.close()
    command.assert_nothing_is_left(port)
    assert command.run("status")[0] == 1


def test_up_with_simulated_workers_says_so_and_ends_with_its_terminal(command: Command, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny.CHECKPOINT, tmp_path / "model"))
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20}')
    flags = ("--simulate", "instant", "--prefill", "2", "--combined", "4", "--log-level", "warning")
    was = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored here, and children inherit that
    try:
        up = command.start("--model", str(model), *flags)
    finally:
        signal.signal(signal.SIGHUP, was)
    assert up.stdout is not None
    url = up.stdout.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:"), command.errors()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        assert client.completions.create(model=name, prompt="fox " * 9, max_tokens=8).usage
    assert "generation_config.json: temperature 0.5, top_k 20" in command.errors()
    code, output = command.run("status")
    assert (code, "combined-3" in output, "prefill-1" in output, "simulated" in output) == (0, True, True, True)
    assert "simulated" in command.errors()
    os.killpg(up.pid, signal.SIGHUP)  # to the group, as a closed terminal and some service managers do
    assert up.wait(DOWN_S) == 0
    up.stdout.close()
    command.assert_nothing_is_left(int(url.split(":")[-1]))


def test_a_detached_cluster_outlives_its_terminal_and_is_cleaned_up_after_kill_9(command: Command) -> None:
    flags = ("--detach", "--port", "0", "--simulate", "instant", "--prefill", "0")
    code, output = command.run("up", "--model", str(tiny.CHECKPOINT), *flags)
    assert code == 0, output
    assert "Serving" in output
    assert "Stop: `cpd down`" in output
    launcher = command.launcher()
    os.kill(launcher, signal.SIGHUP)
    code, output = command.run("status")
    assert (code, "combined-0" in output) == (0, True), output
    code, output = command.run("status", "--cluster", "other")
    assert (code, "'other' is running on this machine; there are: default" in output) == (1, True)
    code, output = command.run("logs", "router-0")
    assert code == 0
    assert {line.split()[3] for line in output.splitlines()} == {"router-0"}, output
    with command.open("logs", "-f") as follower:
        assert follower.stdout is not None
        assert "cpd up starts" in follower.stdout.readline()
        os.kill(launcher, signal.SIGKILL)
        assert "router-0" in follower.stdout.read()  # to the end, which comes with the cluster's
    code, output = command.run("down")
    assert (code, "had been killed" in output) == (0, True), output
    assert not command.processes()
    command.assert_nothing_is_left()
    assert "router-0" in command.run("logs")[1]


def test_processes_are_added_removed_and_restarted_while_the_cluster_runs(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "cpd.yaml"
    config.write_text("prefill: 0\nmax-num-seqs: 32\nkv-memory: 64MiB\n")
    model = ("--model", str(tiny.CHECKPOINT), "--config", str(config), "--log-level", "warning")
    code, output = command.run("up", "--detach", "--port", "0", *model)
    assert code == 0, output
    url = output[output.index("http") :].split()[0]

    def change(*arguments: str) -> str:
        code, output = command.run(*arguments, seconds=CHANGE_S)
        assert code == 0, output + command.run("logs")[1]
        return output

    def workers() -> list[str]:
        code, output = command.run("status", "--json")
        assert code == 0, output
        return [worker["id"] for worker in json.loads(output)["workers"] if worker["state"] == "ready"]

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        name = client.models.list().data[0].id

        def ask() -> str:
            return client.completions.create(model=name, prompt="fox " * 9, max_tokens=8, temperature=0).choices[0].text

        answer = ask()
        output = change("scale", "--combined", "2", "--prefill", "1", "--routers", "2")
        assert "The cluster has 2 combined, 1 prefill, 2 router" in output
        assert workers() == ["combined-0", "combined-1", "prefill-0"]
        cores = [os.sched_getaffinity(command.find_worker(worker)) for worker in workers()]
        assert set.union(*cores) == os.sched_getaffinity(0)
        if len(os.sched_getaffinity(0)) >= len(cores):
            assert sum(map(len, cores)) == len(set.union(*cores))
        assert ask() == answer
        output = change("scale", "--combined", "1", "--prefill", "0", "--routers", "1")
        assert "combined-1 has ended" in output
        assert workers() == ["combined-0"]
        assert os.sched_getaffinity(command.find_worker("combined-0")) == os.sched_getaffinity(0)
        assert ask() == answer

        before = command.find_worker("combined-0")
        config.write_text("prefill: 0\nmax-num-seqs: 16\nkv-memory: 64MiB\n")
        output = change("restart", "combined-0")
        assert "Changed settings: max-num-seqs" in output
        assert "combined-1 is ready to stand in" in output
        after = command.find_worker("combined-0")
        assert after != before
        assert b"--max-num-seqs\x0016\x00" in Path(f"/proc/{after}/cmdline").read_bytes()
        assert workers() == ["combined-0"]
        assert ask() == answer

    config.write_text("prefill: 0\nmax-num-seqs: 16\nkv-memory: 1KiB\n")
    code, output = command.run("restart", "combined-0", "router-0")
    assert (code, "1024 is too small for this model" in output, "ends" in output) == (1, True, False), output
    assert command.find_worker("combined-0") == after  # nothing was touched
    config.write_text("prefill: 0\nmax-num-seqs: 16\nkv-memory: 64MiB\ndtype: bfloat16\n")
    code, output = command.run("restart")
    assert (code, "dtype can't change while the cluster runs" in output) == (1, True), output
    code, output = command.run("restart", "nobody")
    assert (code, "has started no nobody; it has started combined-0, router-0" in output) == (1, True), output
    with command.open("scale", "--combined", "2") as scale:  # the end of the cluster cuts it short
        eventually(lambda: "Starting combined-1" in command.run("logs", "cpd-up")[1], "it starts")
        assert command.run("down") == (0, "Cluster 'default' is down.\n")
        assert scale.wait(DOWN_S) == 1
    command.assert_nothing_is_left(int(url.split(":")[-1]))


def test_the_workers_of_two_models_are_started_scaled_restarted_and_drained(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "cpd.yaml"
    models = [f"  - {{name: {name}, model: {tiny.CHECKPOINT}}}\n" for name in ("one", "two")]
    config.write_text("kv-memory: 64MiB\nlog-level: warning\nmodels:\n" + "".join(models))
    code, output = command.run("up", "--detach", "--port", "0", "--config", str(config))
    assert code == 0, output
    assert "Serving one, two at http" in output
    url = output[output.index("http") :].split()[0]

    def change(*arguments: str) -> str:
        code, output = command.run(*arguments, seconds=CHANGE_S)
        assert code == 0, output + command.run("logs")[1]
        return output

    def workers() -> list[tuple[str, str]]:
        answer = json.loads(change("status", "--json"))
        return [(worker["id"], worker["model"]) for worker in answer["workers"] if worker["state"] == "ready"]

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        def ask(model: str) -> str:
            answer = client.completions.create(model=model, prompt="fox " * 9, max_tokens=8, temperature=0)
            return answer.choices[0].text

        assert [one.id for one in client.models.list().data] == ["one", "two"]
        text = ask("one")
        assert ask("two") == text
        assert workers() == [("one-combined-0", "one"), ("two-combined-0", "two")]
        cores = [os.sched_getaffinity(command.find_worker(name)) for name, _ in workers()]
        assert set.union(*cores) == os.sched_getaffinity(0)
        if len(os.sched_getaffinity(0)) >= len(cores):
            assert sum(map(len, cores)) == len(set.union(*cores))
        code, output = command.run("scale", "--combined", "2")
        assert (code, "say whose workers are meant, with --model: the cluster has one, two" in output) == (1, True)
        code, output = command.run("scale", "--combined", "2", "--model", "three")
        assert (code, "has no model 'three'; it has one, two" in output) == (1, True)
        output = change("scale", "--combined", "2", "--model", "two")
        assert "The cluster has 1 combined of one, 0 prefill of one, 2 combined of two, 0 prefill of two" in output
        assert [name for name, _ in workers()] == ["one-combined-0", "two-combined-0", "two-combined-1"]
        untouched, before = command.find_worker("one-combined-0"), command.find_worker("two-combined-0")
        output = change("restart", "two-combined-0")
        assert "two-combined-2 is ready to stand in" in output
        assert command.find_worker("two-combined-0") != before
        assert "two-combined-1 has ended" in change("drain", "two-combined-1")
        assert [name for name, _ in workers()] == ["one-combined-0", "two-combined-0"]
        assert command.find_worker("one-combined-0") == untouched
        assert ask("one") == ask("two") == text
    assert "Starting two-combined-1" in change("logs", "cpd-up")
    config.write_text(config.read_text().replace("name: two", "name: three"))
    code, output = command.run("restart")
    assert (code, "models can't change while the cluster runs" in output) == (1, True), output
    assert command.run("down") == (0, "Cluster 'default' is down.\n")
    command.assert_nothing_is_left(int(url.split(":")[-1]))


def test_models_that_share_a_machine_start_in_turn_and_have_all_of_its_cores(command: Command, tmp_path: Path) -> None:
    config = tmp_path / "cpd.yaml"
    models = [f"  - {{name: {name}, model: {tiny.CHECKPOINT}}}\n" for name in ("one", "two")]
    config.write_text("kv-memory: 64MiB\ndevice-memory: 1GiB\nmodels:\n" + "".join(models))
    code, output = command.run("up", "--detach", "--port", "0", "--config", str(config))
    assert code == 0, output
    url = output[output.index("http") :].split()[0]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        texts = {
            client.completions.create(model=name, prompt="fox " * 9, max_tokens=8, temperature=0).choices[0].text
            for name in ("one", "two")
        }
    assert len(texts) == 1
    for name in ("one", "two"):
        assert os.sched_getaffinity(command.find_worker(f"{name}-combined-0")) == os.sched_getaffinity(0)
    with Redis(unix_socket_path=str(command.directory / "cpd/default/redis.sock")) as redis:
        record = redis.hget(f"cpd:default:device:{socket.gethostname()}", "record")
    assert isinstance(record, bytes)
    entries = json.loads(record.partition(b"{")[1] + record.partition(b"{")[2])["entries"]
    assert {one["id"]: one["state"] for one in entries} == {"one-combined-0": "serving", "two-combined-0": "serving"}
    assert sum(one["memory_bytes"] for one in entries) <= 1 << 30
    code, output = command.run("restart", "one-combined-0", seconds=CHANGE_S)
    assert (code, "no additional worker stands in" in output) == (0, True), output
    assert command.run("down") == (0, "Cluster 'default' is down.\n")
    command.assert_nothing_is_left(int(url.split(":")[-1]))


@pytest.mark.parametrize("combined", [1, 3])
def test_a_planner_starts_and_ends_workers_within_its_bounds(command: Command, combined: int) -> None:
    flags = ["--detach", "--port=0", f"--model={tiny.CHECKPOINT}", "--kv-memory=64MiB", "--log-level=warning"]
    flags += [f"--combined={combined}", "--prefill=0", "--planner=act", "--min-workers=2", "--max-workers=2"]
    code, output = command.run("up", *flags)
    assert code == 0, output

    def said(text: str) -> bool:
        return text in command.run("logs", "cpd-up")[1]

    eventually(lambda: said("The cluster has 2 combined, 0 prefill, 1 router"), "two workers run")
    assert said(f"The planner wants 2 workers instead of {combined}: ")
    code, output = command.run("status", "--json")
    assert code == 0, output
    ready = [worker["id"] for worker in json.loads(output)["workers"] if worker["state"] == "ready"]
    assert ready == ["combined-0", "combined-1"]
    code, output = command.run("plan")
    assert (code, "Workers that should run: 2 (" in output) == (0, True), output
    assert command.run("down") == (0, "Cluster 'default' is down.\n")


def test_what_was_drained_or_scaled_away_stays_away_when_its_supervisor_dies(command: Command) -> None:
    up = command.start("--simulate", "instant", "--prefill", "0", "--routers", "3", "--log-level", "warning")
    assert up.stdout is not None
    assert "Serving" in up.stdout.readline(), command.errors()
    before = {index: command.find_router(index) for index in range(3)}
    supervisors = {index: parent(pid) for index, pid in before.items() if pid}

    code, output = command.run("drain", "router-1")
    assert (code, "router-1 has ended" in output) == (0, True), output
    eventually(lambda: "router-1 was drained and has ended" in command.errors(), "`cpd up` has seen it")
    with contextlib.suppress(ProcessLookupError):  # there need be none of a process that has ended for good
        os.kill(supervisors[1], signal.SIGKILL)

    with command.open("scale", "--routers", "1") as scale:
        eventually(lambda: "router-2 ends its requests" in command.errors(), "router-2 drains")
        os.kill(supervisors[2], signal.SIGKILL)
        assert scale.wait(CHANGE_S) == 0
    assert command.find_router(2) is None

    os.kill(supervisors[0], signal.SIGKILL)
    eventually(lambda: command.find_router(0) not in (None, before[0]), "a router that just crashed comes back")
    assert [command.find_router(index) for index in (1, 2)] == [None, None]
    assert "router-1 ends its requests" not in command.errors()  # it was away when the cluster was scaled
    assert command.run("down")[0] == 0
    assert up.wait(DOWN_S) == 0
    up.stdout.close()


def test_requests_are_served_after_rays_gcs_dies_and_up_ends_when_its_raylet_dies(command: Command) -> None:
    up = command.start("--simulate", "instant", "--prefill", "0", "--log-level", "warning")
    assert up.stdout is not None
    url = up.stdout.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:"), command.errors()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        os.kill(command.find("/gcs_server "), signal.SIGKILL)
        eventually(lambda: "gcs_server died. The cluster goes on" in command.errors(), "the message about gcs_server")
        assert client.completions.create(model=model, prompt="fox " * 9, max_tokens=8).usage
    assert up.poll() is None
    os.kill(command.find("/raylet/raylet "), signal.SIGKILL)
    assert up.wait(DOWN_S) == 1
    up.stdout.close()
    last = command.errors().strip().splitlines()[-1]
    assert last == "error: Ray's raylet died, and the cluster with it; start it again"
    command.assert_nothing_is_left(int(url.split(":")[-1]))


def test_up_ends_with_the_error_of_a_process_that_cannot_start(command: Command) -> None:
    port = free_port()
    with command.start("--prefill", "0", "--port", str(port)) as up, socket.socket() as other:
        eventually(lambda: any("raylet" in line for line in command.processes().values()), "Ray is starting")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))  # takes the port after `cpd up` has found it free
        other.listen()
        assert up.wait(UP_S) == 1
    last = command.errors().strip().splitlines()[-1]
    assert (
        last == f"error: router-0 on {socket.gethostname()}: can't listen on 127.0.0.1:{port}: Address already in use"
    )
    command.assert_nothing_is_left()


def test_ctrl_c_during_start_ends_everything(command: Command) -> None:
    with command.start() as up:
        eventually(lambda: any("raylet" in line for line in command.processes().values()), "Ray is starting")
        os.killpg(up.pid, signal.SIGINT)
        assert up.wait(DOWN_S) == 0
    command.assert_nothing_is_left()


def combined_worker(command: Command) -> dict[str, Any]:
    """The combined worker in `cpd status --json`; empty if there is none."""
    code, output = command.run("status", "--json")
    assert code == 0, output
    workers: dict[str, dict[str, Any]] = {worker["id"]: worker for worker in json.loads(output)["workers"]}
    return workers.get("combined-0", {})


def parent(pid: int) -> int:
    """Process id of the parent process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
