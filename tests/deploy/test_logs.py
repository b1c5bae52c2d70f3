import threading
from pathlib import Path

import pytest

from cpd.common.errors import CPDError
from deploy import logs
from deploy.logs import ClusterLog, log_file, print_logs, read_log


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CPD_RUNTIME_DIR", str(tmp_path / "cpd"))
    return tmp_path / "state"


def test_lines_of_all_or_some_processes_are_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    log = ClusterLog("c")
    log.write("combined-0", ["one", "a\ttab and 100 %s"])
    log.write("router-0", ["two"])
    log.close()
    print_logs("c", [], follow=False)
    assert capsys.readouterr().out == "one\na\ttab and 100 %s\ntwo\n"
    print_logs("c", ["router-0"], follow=True)  # ends at once: the cluster does not run
    assert capsys.readouterr().out == "two\n"
    with pytest.raises(CPDError, match="no lines of nobody; it has lines of combined-0, router-0"):
        print_logs("c", ["nobody"], follow=False)


def test_a_text_of_several_lines_belongs_to_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    log = ClusterLog("c")
    log.write("cpd-up", ["error: not valid\n  in line 1\n\nof it", ""])
    log.close()
    print_logs("c", ["cpd-up"], follow=False)
    assert capsys.readouterr().out == "error: not valid\n  in line 1\n\nof it\n\n"


def test_only_its_owner_can_read_the_log() -> None:
    log = ClusterLog("c")
    log.write("router-0", ["two"])
    log.close()
    assert log.path.stat().st_mode & 0o077 == 0
    assert log.path.parent.stat().st_mode & 0o077 == 0


def test_the_disk_holds_a_bounded_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 100)
    log = ClusterLog("c")
    for number in range(200):
        log.write("w", [f"line {number}"])
    log.close()
    files = list(log.path.parent.iterdir())
    assert len(files) == 1 + logs.OLD_FILES
    assert all(file.stat().st_size <= 100 for file in files)
    lines = [line for _, line in read_log(log.path, lambda: False)]
    assert lines == [f"line {number}" for number in range(200 - len(lines), 200)]


def test_a_follower_gets_each_line_once_across_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE_BYTES", 400)
    log = ClusterLog("c")
    ended = threading.Event()
    got: list[str] = []
    more = threading.Condition()

    def read() -> None:
        for _, line in read_log(log.path, lambda: not ended.is_set()):
            with more:
                got.append(line)
                more.notify()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        log.write("w", [f"line {number}"])
        with more:
            assert more.wait_for(lambda count=number + 1: len(got) >= count, timeout=30)  # type: ignore[misc]
    ended.set()
    reader.join()
    log.close()
    assert got == [f"line {number}" for number in range(100)]


def test_a_line_that_is_being_written_waits_for_its_end() -> None:
    path = log_file("c")
    path.parent.mkdir(parents=True)
    path.write_text("w\tone\nw\tha")
    assert list(read_log(path, lambda: False)) == [("w", "one")]


def test_a_full_disk_loses_lines_and_stops_nothing() -> None:
    log = ClusterLog("c")
    assert log._file.stream is not None
    log._file.stream.close()
    log._file.stream = open("/dev/full", "w")  # noqa: SIM115 - closed with the log
    log.write("w", ["lost"])
    log.close()
