import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from cpd.common.errors import CPDError
from deploy import listener as module
from deploy.listener import SharedListener
from router.listener import LISTENER_FD, inherited
from tests.deploy.test_process import wait_for
from tests.ports import free_port

Share = Callable[..., SharedListener]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def share(port: int) -> Iterator[Share]:
    """Shares the test's port, as one supervisor does."""
    opened: list[SharedListener] = []

    def start(cluster: str = "blue") -> SharedListener:
        opened.append(SharedListener(cluster, "127.0.0.1", port))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def inode(listener: SharedListener) -> int:
    """Number of the socket, the same for all copies."""
    return os.fstat(listener.fileno()).st_ino


def accept(listener: SharedListener) -> socket.socket:
    with socket.socket(fileno=os.dup(listener.fileno())) as copy:
        copy.settimeout(30)
        return copy.accept()[0]


def test_supervisors_share_one_socket(share: Share) -> None:
    listeners = [share() for _ in range(4)]
    assert len({inode(one) for one in listeners}) == 1


def test_a_waiting_connection_outlives_the_supervisor_that_opened_the_socket(share: Share, port: int) -> None:
    first = share()
    first.fileno()
    second = share()
    assert inode(second) == inode(first)
    with socket.create_connection(("127.0.0.1", port)) as client:
        first.close()
        third = share()  # the second one offers now
        assert inode(third) == inode(second)
        second.close()
        with accept(third) as served:
            served.sendall(b"hello")
            assert client.recv(5) == b"hello"


def test_one_that_stands_by_offers_when_the_process_that_offered_is_killed(share: Share, port: int) -> None:
    code = (
        "import sys; from deploy.listener import SharedListener; "
        f"SharedListener('blue', '127.0.0.1', {port}).fileno(); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        here = share()
        number = inode(here)
        other.kill()
    assert inode(share()) == number


def test_once_all_copies_are_closed_connections_are_refused(share: Share, port: int) -> None:
    for one in [share(), share()]:
        one.fileno()
        one.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_another_cluster_does_not_share(share: Share) -> None:
    assert inode(share("blue")) != inode(share("green"))


def test_a_port_of_another_program_is_refused(share: Share, port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(CPDError, match=f"can't listen on 127.0.0.1:{port}"):
            share().fileno()


def test_a_socket_of_another_user_is_not_taken(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    share().fileno()
    monkeypatch.setattr(module, "_is_same_user", lambda _: False)
    with pytest.raises(CPDError, match="another user"):
        share().fileno()


def test_close_ends_the_thread_in_every_state(share: Share) -> None:
    offering, standing_by, opening = share(), share(), share()
    offering.fileno()
    standing_by.fileno()
    for one in (opening, standing_by, offering):
        one.close()
        with pytest.raises(CPDError, match="closed"):
            one.fileno()
    wait_for(lambda: all(one.name != "shared-listener" for one in threading.enumerate()), "the threads end")


def test_a_router_takes_the_socket_that_its_supervisor_passes(share: Share, port: int) -> None:
    fd = os.dup(share().fileno())
    with inherited({LISTENER_FD: str(fd)}) or socket.socket() as taken:
        assert taken.getsockname() == ("127.0.0.1", port)
        assert not taken.get_inheritable()


def test_a_router_started_by_hand_has_none() -> None:
    assert inherited({}) is None
