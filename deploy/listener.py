"""The listening socket of a machine's routers, which belongs to their supervisors.

    opening ──▶ offering ──▶ closed
       └─▶ standing by ─▶┘

The first supervisor opens the socket, and offers copies of it on an abstract Unix socket. The others take a copy and
stand by: when the supervisor that offers ends, one of them offers. So all routers of a machine accept from one queue.
A connection in it is not lost when a router ends, as long as one supervisor is left: another router takes it, or the
next one. (Of several sockets on one port, each has a queue, and closing one resets the connections in it.)

An abstract Unix socket and a TCP port are known in the same network namespace. Every user can connect to one, so both
ends check that the other one runs as the same user.
"""

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from hashlib import blake2b

from cpd.common.addresses import join_address
from cpd.common.errors import CPDError
from router.listener import listen

log = logging.getLogger(__name__)

RETRY_S = 0.02
BACKLOG = 2048
LOOK_S = 0.3
"""Time for which a new supervisor looks for one that offers before it opens a socket, in seconds."""


class SharedListener:
    """This supervisor's copy of the socket. One thread opens it, and offers copies or stands by until `close`.

    Args:
        cluster: Name of the cluster; others don't share its socket.
    """

    def __init__(self, cluster: str, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._name = "\0cpd-listener-" + blake2b(repr((cluster, host, port)).encode(), digest_size=16).hexdigest()
        self._opened = threading.Event()
        self._lock = threading.Lock()  # guards everything below
        self._listener: socket.socket | None = None
        self._error: CPDError | None = None
        self._blocking: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shared-listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Returns the file descriptor, once the socket is open.

        Raises:
            CPDError: The address can't be used, or this listener is closed.
        """
        self._opened.wait()
        with self._lock:
            if self._listener is None:
                raise self._error or CPDError("the listening socket is closed")
            return self._listener.fileno()

    def close(self) -> None:
        """Closes this copy. Idempotent."""
        with self._lock:
            self._closed = True
            if self._blocking:
                with contextlib.suppress(OSError):
                    self._blocking.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._look_for_copy()
            while not self._closed and self._error is None:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
                    try:
                        unix.bind(self._name)
                    except OSError as error:
                        if error.errno != errno.EADDRINUSE:
                            raise
                        self._stand_by()
                    else:
                        self._offer(unix)
        except CPDError as error:
            self._error = error
        finally:
            with self._lock:
                if self._listener:
                    self._listener.close()
                self._listener = None
            self._opened.set()

    def _look_for_copy(self) -> None:
        """Takes a copy from a supervisor that offers, or will in a moment because the one that did has just ended."""
        looks_until = time.monotonic() + LOOK_S
        while not self._closed and self._listener is None and time.monotonic() < looks_until:
            self._stand_by()

    def _offer(self, unix: socket.socket) -> None:
        """Opens the socket unless there is a copy already, and gives copies to others until `close`."""
        if self._listener is None:
            self._take(listen(self._host, self._port))
        unix.listen()
        standing_by: list[socket.socket] = []
        try:
            while self._blocks_on(unix):
                try:
                    other, _ = unix.accept()
                except OSError:  # closed, or the other one is gone
                    continue
                for one in list(filter(_has_ended, standing_by)):
                    standing_by.remove(one)
                    one.close()
                standing_by.append(other)
                if _is_same_user(other) and self._listener:
                    with contextlib.suppress(OSError):
                        socket.send_fds(other, [b"."], [self._listener.fileno()])
        finally:
            for one in standing_by:
                one.close()

    def _stand_by(self) -> None:
        """Takes a copy if there is none yet, and returns when the supervisor that offers has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as offer:
            try:
                offer.connect(self._name)
            except OSError:  # it has not begun to offer, or has ended
                time.sleep(RETRY_S)
                return
            if not self._blocks_on(offer):
                return
            if not _is_same_user(offer):
                raise CPDError(
                    f"another user of this machine holds the routers' socket for {join_address(self._host, self._port)}"
                )
            with contextlib.suppress(OSError):
                _, descriptors, _, _ = socket.recv_fds(offer, 1, 1)
                for descriptor in descriptors:
                    copy = socket.socket(fileno=descriptor)
                    if self._listener is None:
                        self._take(copy)
                    else:
                        copy.close()
                offer.recv(1)  # returns when the other end is closed

    def _take(self, listener: socket.socket) -> None:
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise CPDError(f"can't listen on {join_address(self._host, self._port)}: {error.strerror}") from None
        with self._lock:
            self._listener = listener
        self._opened.set()

    def _blocks_on(self, unix: socket.socket) -> bool:
        """Lets `close` interrupt calls on this socket; False if it is closed already."""
        with self._lock:
            self._blocking = unix
            return not self._closed


def _is_same_user(other: socket.socket) -> bool:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())


def _has_ended(other: socket.socket) -> bool:
    try:
        return not other.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
