import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cpd.common.errors import ConfigError, CPDError
from deploy.control import Change, ask, control_socket
from tests.waiting import DEADLINE_S

Tell = Callable[[str], None]


@contextmanager
def serving(tmp_path: Path, change: Change) -> Iterator[Path]:
    path = tmp_path / "control.sock"
    with control_socket(path, {"scale": change}, threading.Lock(), lambda _: None):
        yield path


def test_a_change_gets_its_arguments_and_its_steps_are_shown(tmp_path: Path) -> None:
    def change(arguments: Mapping[str, Any], tell: Tell) -> None:
        tell(f"to {arguments['combined']}")
        tell("done")

    steps: list[str] = []
    with serving(tmp_path, change) as path:
        assert path.stat().st_mode & 0o077 == 0
        ask(path, "scale", {"combined": 3}, steps.append)
    assert steps == ["to 3", "done"]


def test_refusals_and_failures_are_errors_and_the_next_change_is_made(tmp_path: Path) -> None:
    errors: list[Exception] = [ConfigError("no room"), ValueError("odd")]

    def change(arguments: Mapping[str, Any], tell: Tell) -> None:
        if errors:
            raise errors.pop(0)

    with serving(tmp_path, change) as path:
        with pytest.raises(CPDError, match=r"^no room$"):
            ask(path, "scale", {}, print)
        with pytest.raises(CPDError, match="the change failed: ValueError"):
            ask(path, "scale", {}, print)
        with pytest.raises(CPDError, match="another version"):
            ask(path, "dance", {}, print)
        ask(path, "scale", {}, print)


def test_one_change_at_a_time_which_goes_on_without_its_client(tmp_path: Path) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def change(arguments: Mapping[str, Any], tell: Tell) -> None:
        tell("begun")
        assert go_on.wait(DEADLINE_S)
        tell("nobody reads this")
        ended.set()

    with serving(tmp_path, change) as path:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b'{"change": "scale", "arguments": {}}\n')
            assert b"begun" in client.recv(100)
            with pytest.raises(CPDError, match="is being changed already"):
                ask(path, "scale", {}, print)
        go_on.set()
        assert ended.wait(DEADLINE_S)


def test_a_cluster_that_is_still_starting_or_has_ended_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CPDError, match="still starting"):
        ask(tmp_path / "control.sock", "scale", {}, print)
    with serving(tmp_path, lambda *_: None) as path:
        pass
    with pytest.raises(CPDError, match="does not answer"):
        ask(path, "scale", {}, print)
