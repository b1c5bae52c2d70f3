"""What needs no Ray; `cpd up` itself is tested in tests/e2e/test_up.py."""

import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from cpd.common.process import EXIT_DRAINED
from cpd.common.settings import ClusterSettings
from deploy import up
from deploy.cluster import Cluster
from deploy.process import ProcessState
from deploy.processes import processes
from deploy.redis import EmbeddedRedis
from deploy.state import ClusterDir
from tests.secret import secret_file

RUNS = ProcessState("host", 1, 1, None, exit_code=None, lines=[], next_line=0)
DRAINED = replace(RUNS, pid=None, exit_code=EXIT_DRAINED)
CRASHED = replace(RUNS, pid=None, exit_code=-9)


class Watched:
    """The processes of a cluster that is watched for some rounds.

    Args:
        rounds: The reports of each round, after each of which its function is called.
    """

    def __init__(self, *rounds: tuple[dict[str, ProcessState], Callable[[], object]]) -> None:
        self.specs = processes(
            ClusterSettings(model="m", combined=1, prefill=0, routers=2, secret_file=secret_file()), "127.0.0.1"
        )
        self._rounds = list(rounds)
        self._after: Callable[[], object] = lambda: None

    def states(self) -> dict[str, ProcessState]:
        self._after()
        if not self._rounds:
            raise KeyboardInterrupt
        states, self._after = self._rounds.pop(0)
        return states

    def last_lines(self) -> list[tuple[str, list[str]]]:
        return []

    def lost(self) -> dict[str, str]:
        return {}


class Said(up._Output):
    """Notes what `cpd up` says."""

    def __init__(self, cluster: str, console: Console) -> None:
        super().__init__(cluster, console)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterDir]:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(up, "_RUNNING_POLL_S", 0.0)
    monkeypatch.setattr(up, "dead_process", lambda: "")
    directory = ClusterDir("c")
    with directory.hold():
        yield directory


def watch(
    cluster: Watched,
    directory: ClusterDir,
    find: Callable[[Collection[str]], bool] = lambda _: True,
    redis: EmbeddedRedis | None = None,
) -> list[str]:
    """Watches the cluster for its rounds; returns what is said."""
    with Said("c", Console(quiet=True)) as output, pytest.raises(KeyboardInterrupt):
        up._watch(cast(Cluster, cluster), redis, directory, find, output)
    return output.said


def test_a_full_disk_is_said_once_and_what_was_not_written_is_written_when_there_is_room(
    directory: ClusterDir,
) -> None:
    full = [directory.path / name for name in ("missing.new", "drained")]
    for file in full:
        file.symlink_to("/dev/full")
    states = {"combined-0": CRASHED, "router-1": DRAINED}

    def make_room() -> None:
        for file in full:
            file.unlink()

    seen: list[tuple[list[str], dict[str, str]]] = []
    cluster = Watched(
        (states, lambda: None),
        (states, make_room),
        (states, lambda: seen.append((directory.drained(), directory.missing()))),
    )
    said = watch(cluster, directory)
    assert [sentence for sentence in said if "can't be written" in sentence] == [
        f"{directory.path} can't be written: No space left on device. The cluster goes on, and this is tried again"
    ]
    assert seen == [(["router-1"], {"combined-0": "ended with exit code -9; it starts again"})]


def test_the_cluster_goes_on_when_its_runtime_directory_is_deleted(directory: ClusterDir) -> None:
    redis = EmbeddedRedis(directory.redis_socket)
    shutil.rmtree(directory.path)
    states = {"combined-0": CRASHED}
    said = watch(Watched((states, lambda: None), (states, lambda: None)), directory, redis=redis)
    assert said[1:2] == ["Redis died; restarting it"]
    assert [sentence.partition(":")[0] for sentence in said] == [
        f"{directory.path} can't be written",
        "Redis died; restarting it",
        "the embedded Redis did not start",
    ]


def test_the_url_is_that_of_a_router_that_was_not_drained(directory: ClusterDir) -> None:
    sought: list[set[str]] = []
    both = {"router-0": RUNS, "router-1": RUNS}
    rounds: list[dict[str, ProcessState]] = [both, {**both, "router-0": DRAINED}, {"router-1": RUNS}, both]

    def find(routers: Collection[str]) -> bool:
        sought.append(set(routers))
        return True

    said = watch(Watched(*((states, lambda: None) for states in rounds)), directory, find)
    assert sought == [{"router-1"}, {"router-0", "router-1"}]
    assert said == ["router-0 was drained and has ended"]
