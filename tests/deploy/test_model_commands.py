"""`cpd models`, `sleep`, `wake` and `pin`, with a router and workers that only answer."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cpd.common.errors import CPDError
from deploy.model_commands import models_table, pin, show_models, sleep, wake
from deploy.state import ClusterDir, ClusterState
from tests.deploy.test_cluster_status import served
from tests.worker_admin import AdminService, listening
from worker.admin_calls import set_role

KEY = "key"


def described(name: str, model: str, state: str | None, address: str = "", **residency: Any) -> dict[str, Any]:
    """A worker in `/cluster`; `state` of its model, None: its device is not shared."""
    shown = {"state": state, "serves_in_s": 0.0, "pinned": False, "since": 1000.0, **residency} if state else None
    return {"id": name, "model": model, "state": "ready", "host": "one", "address": address, "residency": shown}


def answer(*workers: dict[str, Any]) -> dict[str, Any]:
    """The document of `/cluster`."""
    models = [{"name": name, "aliases": [f"org/{name}"]} for name in ("chat", "code", "plain")]
    return {"models": models, "workers": list(workers)}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, AdminService]]:
    """A running cluster: two workers of `chat` and one of `code` share devices, the one of `plain` does not."""
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "cpd"))
    workers = {
        "chat-combined-0": AdminService(key=KEY),
        "chat-combined-1": AdminService(key=KEY),
        "code-combined-0": AdminService("it never was awake", KEY),
    }
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(listening(worker)) for name, worker in workers.items()}
        document = answer(
            described("chat-combined-0", "chat", "serving", ports["chat-combined-0"]),
            described("chat-combined-1", "chat", "asleep", ports["chat-combined-1"]),
            described("code-combined-0", "code", "asleep", ports["code-combined-0"]),
            described("plain-combined-0", "plain", None, "127.0.0.1:1"),
            described("old", "old", "serving", stack.enter_context(listening(None))),
            described("gone", "gone", "serving", "127.0.0.1:1"),
        )
        address = stack.enter_context(served(document))
        directory = ClusterDir("c")
        stack.enter_context(directory.hold())
        directory.write(ClusterState("c", os.getpid(), f"http://{address}", "", KEY, "1"))
        yield workers


def test_a_worker_is_told_by_its_name(cluster: dict[str, AdminService], capsys: pytest.CaptureFixture[str]) -> None:
    sleep("c", "chat-combined-0")
    wake("c", "chat-combined-1")
    assert [worker.told for worker in cluster.values()] == [["sleep"], ["wake"], []]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chat-combined-0 goes to sleep when its requests have ended")
    assert lines[1].startswith("chat-combined-1 wakes when it is its turn")


@pytest.mark.parametrize("name", ["chat", "org/chat"])
def test_a_model_stands_for_all_its_workers(cluster: dict[str, AdminService], name: str) -> None:
    pin("c", name, pinned=True)
    pin("c", name, pinned=False)
    assert [worker.told for worker in cluster.values()] == [["pin", "unpin"], ["pin", "unpin"], []]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chut", r"cluster 'c' has no model or worker 'chut'; models: chat, code, plain; workers: chat-combined-0, .*"),
        ("plain", r"plain has its device for itself, so it never sleeps; devices are shared with --device-memory"),
        ("plain-combined-0", r"plain-combined-0 has its device for itself"),
        ("code", r"worker code-combined-0 refuses: it never was awake"),
        ("old", r"worker old is of an older version, which can't sleep"),
        ("gone", r"worker gone at 127\.0\.0\.1:1 does not answer: "),
    ],
)
def test_the_error_says_what_is_wrong(cluster: dict[str, AdminService], name: str, reason: str) -> None:
    with pytest.raises(CPDError, match=reason):
        sleep("c", name)


def test_a_worker_on_a_shared_device_keeps_its_role() -> None:
    worker = AdminService("models share this worker's device", KEY)
    with (
        listening(worker) as address,
        pytest.raises(CPDError, match="worker w refuses: models share this worker's device"),
    ):
        set_role("w", address, KEY, "prefill")


def test_a_model_without_workers_can_not_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "cpd"))
    directory = ClusterDir("c")
    with served(answer()) as address, directory.hold():
        directory.write(ClusterState("c", os.getpid(), f"http://{address}", "", KEY, "1"))
        with pytest.raises(CPDError, match="no worker of the model 'chat' runs"):
            wake("c", "org/chat")


def test_the_table_names_each_worker_with_its_state(
    cluster: dict[str, AdminService], capsys: pytest.CaptureFixture[str]
) -> None:
    show_models("c")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "state", "worker", "where", "since"]
    assert lines[1].split()[:4] == ["chat", "serving", "chat-combined-0", "one"]
    assert lines[2].split()[:3] == ["asleep", "chat-combined-1", "one"]
    assert lines[4].split() == ["plain", "serving", "plain-combined-0", "one"]


def test_the_table_shows_promises_pins_and_workers_that_can_not_be_used() -> None:
    workers = [
        described("chat-combined-0", "chat", "waking", serves_in_s=4.2, since=990.0),
        described("chat-combined-1", "chat", "serving", pinned=True, since=1000.0 - 7200),
        described("code-combined-0", "code", "asleep") | {"state": "refused"},
    ]
    output = io.StringIO()
    Console(file=output, width=100).print(models_table(answer(*workers), 1000.0))
    rows = [" ".join(line.split()) for line in output.getvalue().splitlines()[1:]]
    assert rows == [
        "chat waking, serves within 4 s chat-combined-0 one 10 s",
        "serving, pinned chat-combined-1 one 2 h",
        "code refused code-combined-0 one 0 s",
        "plain no worker",
    ]
