import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpd.common.errors import ConfigError, CPDError
from cpd.common.trust import read_secret
from deploy.processes import LAUNCH_MARK
from deploy.remote import down, running_cluster
from deploy.state import ClusterDir, ClusterState, running_clusters
from tests.deploy.test_process import wait_for
from tests.waiting import DEADLINE_S


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "cpd"))
    return tmp_path


def state(cluster: str = "c") -> ClusterState:
    return ClusterState(cluster, os.getpid(), "http://127.0.0.1:8000", ray_dir="", admin_key="", launch="1")


@contextlib.contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs `code`, once it has printed a line."""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process


def test_a_held_cluster_can_be_found_and_is_gone_afterwards(runtime_dir: Path) -> None:
    cluster = ClusterDir("c")
    assert cluster.read() is None
    with cluster.hold():
        assert ClusterDir("c").read() is None  # it has written no state yet
        cluster.write(state())
        assert ClusterDir("c").read() == state()
        assert ClusterDir("other").read() is None
        assert (cluster.path / "state.json").stat().st_mode & 0o077 == 0
        assert cluster.path.stat().st_mode & 0o077 == 0
    assert ClusterDir("c").read() is None
    assert not cluster.path.exists()


def test_what_is_missing_can_be_read() -> None:
    cluster = ClusterDir("c")
    assert ClusterDir("c").missing() == {}
    with cluster.hold():
        assert ClusterDir("c").missing() == {}
        cluster.write_missing({"combined-1": "two is lost"})
        assert ClusterDir("c").missing() == {"combined-1": "two is lost"}
        cluster.write_missing({})
        assert ClusterDir("c").missing() == {}


def test_the_same_cluster_is_not_started_twice() -> None:
    with (
        ClusterDir("c").hold(),
        pytest.raises(ConfigError, match="'c' is running already"),
        ClusterDir("c").hold(),
    ):
        pass


def test_files_of_a_killed_owner_are_removed(tmp_path: Path) -> None:
    ray_dir = tmp_path / "ray"
    ray_dir.mkdir()
    owner = (
        "import os, signal; from deploy.state import ClusterDir, ClusterState\n"
        "cluster = ClusterDir('c')\n"
        "with cluster.hold():\n"
        f"    cluster.write(ClusterState('c', os.getpid(), 'http://x', {str(ray_dir)!r}, '', '1'))\n"
        "    cluster.redis_socket.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", owner]).returncode == -9
    cluster = ClusterDir("c")
    assert cluster.read() is None
    keeper = "import sys; file = open(sys.argv[1], 'w'); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", keeper, str(ray_dir / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline()
        with cluster.hold():
            assert agent.wait(DEADLINE_S) == -9
            assert not ray_dir.exists()
            assert not cluster.redis_socket.exists()
            assert cluster.read() is None


def test_processes_of_a_killed_owner_are_ended_and_those_of_others_are_not() -> None:
    owner = (
        "import os, signal; from deploy.state import ClusterDir, ClusterState\n"
        "with ClusterDir('c').hold():\n"
        "    ClusterDir('c').write(ClusterState('c', os.getpid(), 'http://x', '', '', 'mine'))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", owner]).returncode == -9
    sleeper = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    mine, other = (
        subprocess.Popen(sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, LAUNCH_MARK: mark})
        for mark in ("mine", "others")
    )
    with mine, other:
        for process in (mine, other):
            assert process.stdout is not None
            assert process.stdout.readline()
        assert ClusterDir("c").clean_up()
        assert mine.wait(DEADLINE_S) == -9
        assert other.poll() is None
        other.kill()
    assert not ClusterDir("c").path.exists()
    assert not ClusterDir("c").clean_up()


def test_running_clusters_are_listed() -> None:
    assert running_clusters() == []
    with ClusterDir("b").hold(), ClusterDir("a").hold(), ClusterDir("starting").hold():
        ClusterDir("b").write(state("b"))
        ClusterDir("a").write(state("a"))
        assert running_clusters() == ["a", "b"]
        with pytest.raises(CPDError, match=r"no cluster 'c' is running on this machine; there are: a, b"):
            running_cluster("c")


def test_a_cluster_that_only_starts_can_be_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    owner = (
        "import os, sys; from deploy.state import ClusterDir, ClusterState\n"
        "with ClusterDir('c').hold():\n"
        "    ClusterDir('c').write(ClusterState('c', os.getpid()))\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with running(owner) as process:
        with pytest.raises(CPDError, match="'c' only starts"):
            running_cluster("c")
        down("c")
        assert process.wait(DEADLINE_S) == -15
    assert capsys.readouterr().out == "Cluster 'c' is down.\n"
    assert not ClusterDir("c").path.exists()


def test_a_cluster_whose_state_changes_while_it_ends_is_waited_for() -> None:
    owner = (
        "import os, signal, sys, time; from dataclasses import replace\n"
        "from deploy.state import ClusterDir, ClusterState\n"
        "state = ClusterState('c', os.getpid())\n"
        "def end(*_):\n"
        "    ClusterDir('c').write(replace(state, url='http://x')); time.sleep(1); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "with ClusterDir('c').hold():\n"
        "    ClusterDir('c').write(state)\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with running(owner) as process:
        down("c")
        assert not ClusterDir("c").path.exists()
        assert process.wait(DEADLINE_S) == 0


def test_state_of_another_version_is_an_error_while_it_runs_and_removed_after() -> None:
    cluster = ClusterDir("c")
    with cluster.hold():
        (cluster.path / "state.json").write_text('{"cluster": "c", "pid": 1, "colour": "red"}')
        with pytest.raises(ConfigError, match="another version"):
            ClusterDir("c").read()
    for directory in (cluster.path.parent, cluster.path):
        directory.mkdir(mode=0o700)
    (cluster.path / "state.json").write_text("{")
    with cluster.hold():
        assert ClusterDir("c").read() is None


def test_clusters_that_start_at_once_run_one_after_the_other() -> None:
    owner = (
        "from cpd.common.errors import ConfigError; from deploy.state import ClusterDir\n"
        "for _ in range(50):\n"
        "    try:\n"
        "        with ClusterDir('c').hold(): print('held', flush=True)\n"
        "    except ConfigError: pass\n"
    )
    owners = [subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in owners]
    assert [process.returncode for process in owners] == [0, 0, 0]
    assert any(outputs)
    wait_for(lambda: ClusterDir("c").read() is None, "free")


def test_the_secret_is_a_private_file_that_is_removed_at_the_end() -> None:
    directory = ClusterDir("c")
    with directory.hold():
        file = directory.make_secret()
        assert file.stat().st_mode & 0o777 == 0o600
        assert read_secret(file)
    assert not file.exists()


def test_what_was_drained_is_forgotten_with_the_cluster() -> None:
    cluster = ClusterDir("c")
    cluster.add_drained("combined-0")  # it has ended meanwhile
    with cluster.hold():
        for name in ("router-0", "combined-1", "router-0"):
            cluster.add_drained(name)
        assert cluster.drained() == ["router-0", "combined-1"]
    with cluster.hold():
        assert cluster.drained() == []


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a" * 33, "-x", "a b"])
def test_a_name_that_cannot_be_a_directory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        ClusterDir(name)


def test_a_path_that_is_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_RUNTIME_DIR", "/tmp/" + "long" * 25)
    with pytest.raises(ConfigError, match="too long: set CPD_RUNTIME_DIR"), ClusterDir("c").hold():
        pass


def test_a_directory_that_other_users_can_read_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "cpd").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="only you can access"), ClusterDir("c").hold():
        pass


def test_a_directory_that_is_being_removed_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, other = ClusterDir("ending"), ClusterDir("ending")
    removed = []

    def unlink(file: Path, missing_ok: bool = False) -> None:
        removed.append(file.name)
        assert not other.clean_up()
        if file.name != "lock":
            assert (ending.path / "lock").exists()
        os.unlink(file)

    with ending.hold():
        ending.make_secret()
        ending.write_missing({})
        monkeypatch.setattr(Path, "unlink", unlink)
    assert sorted(removed[:-1]) == ["missing", "secret"]
    assert removed[-1] == "lock"
    assert not ending.path.exists()
