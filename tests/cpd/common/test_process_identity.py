import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cpd.common.process_identity import ProcessIdentity


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_a_stopped_process_is_alive_and_a_killed_one_is_not_even_before_it_was_waited_for() -> None:
    process = sleeper()
    try:
        identity = ProcessIdentity.of(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        alive_while_stopped = identity.alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (alive_while_stopped, identity.alive) == (True, False)
        process.wait()
        assert identity.open() is None
    finally:
        process.kill()
        process.wait()


def test_another_process_with_the_same_id_is_not_taken_for_it() -> None:
    own = ProcessIdentity.own()
    assert own.alive
    assert not replace(own, started=own.started + 1).alive


def test_a_thread_with_the_id_of_an_ended_process_is_not_taken_for_it() -> None:
    ended, ids = threading.Event(), list[int]()

    def run() -> None:
        ids.append(threading.get_native_id())
        ended.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not ids:
            pass
        own = ProcessIdentity.own()
        assert not replace(own, pid=ids[0], started=own.started - 1).alive
    finally:
        ended.set()
        thread.join()


def test_a_process_that_is_hidden_from_this_user_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    process = sleeper()
    try:
        identity = ProcessIdentity.of(process.pid)
        real = Path.read_text

        def hidden(path: Path) -> str:
            if str(process.pid) in path.parts:
                raise FileNotFoundError
            return real(path)

        monkeypatch.setattr(Path, "read_text", hidden)
        assert identity.alive
        process.kill()
        process.wait()
        assert not identity.alive
    finally:
        process.kill()
        process.wait()
