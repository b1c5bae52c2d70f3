"""The runtime directory by which `cpd status` and `cpd down` find a running cluster.

    <root>/<cluster>/lock        held (flock) by the running `cpd up`, and so released when it dies
    <root>/<cluster>/state.json  `ClusterState`
    <root>/<cluster>/drained     names of processes that were drained on request, one a line
    <root>/<cluster>/missing     why processes do not run that should, by name
    <root>/<cluster>/redis.sock  socket of the embedded Redis
    <root>/<cluster>/secret      the cluster's secret, unless --secret-file names another file
    <root>/<cluster>/control.sock  `deploy/control.py`

The root is `$CPD_RUNTIME_DIR` or `/tmp/cpd-<uid>`; only its owner can read it. It is not below `$XDG_RUNTIME_DIR`,
which is removed when its user logs out, while a detached cluster goes on.

After `kill -9` of `cpd up`, its processes end within seconds, and the files stay until `cpd down` or the next `cpd up`.
"""

import contextlib
import fcntl
import os
import re
import secrets
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from cpd.common.errors import ConfigError
from cpd.common.process import GRACE_S
from deploy.processes import LAUNCH_MARK
from deploy.raydir import clear_ray_dir, protected

_LONGEST_SOCKET = 107  # bytes, of sockaddr_un


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A running cluster.

    Attributes:
        pid: Process id of its `cpd up`.
        url: URL of its HTTP endpoint, from this machine; empty while its `cpd up` checks or downloads the models.
        ray_dir: Temporary directory of the local Ray; empty if there is none.
        admin_key: The cluster's key of administration, for workers and routers.
        launch: Random mark of this start, in the environment of the processes (`LAUNCH_MARK`).
        redis_url: Where the routers are listed, if none runs on this machine; otherwise empty.
        secret_file: File with the cluster's secret.
    """

    cluster: str
    pid: int
    url: str = ""
    ray_dir: str = ""
    admin_key: str = ""
    launch: str = ""
    redis_url: str = ""
    secret_file: str = ""


class ClusterDir:
    """The runtime directory of one cluster on this machine.

    Raises:
        ConfigError: The name cannot be a directory's.
    """

    def __init__(self, cluster: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", cluster):
            raise ConfigError(
                f"--cluster must be at most 32 letters, digits, dots, dashes and underscores, got {cluster!r}"
            )
        self.cluster = cluster
        self.path = _root() / cluster

    @property
    def control_socket(self) -> Path:
        """Socket by which `cpd scale` and `cpd restart` reach the launcher."""
        return self.path / "control.sock"

    @property
    def redis_socket(self) -> Path:
        """Socket of the embedded Redis."""
        return self.path / "redis.sock"

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Owns the directory while the context is open, then removes it.

        Raises:
            ConfigError: Another process runs this cluster, other users can read the directory, or its path is too long.
        """
        if len(os.fsencode(self.control_socket)) > _LONGEST_SOCKET:
            raise ConfigError(
                f"the socket path {self.control_socket} is too long: set CPD_RUNTIME_DIR to a shorter path"
            )
        lock = self._lock()
        if lock is None:
            raise ConfigError(
                f"cluster '{self.cluster}' is running already; stop it with `cpd down`"
                " or choose another name with --cluster"
            )
        try:
            self._clear()
            with protected(self.path):
                yield
        finally:
            self._remove(lock)

    def clean_up(self) -> bool:
        """Ends and removes what a killed `cpd up` has left; returns whether there was something."""
        if not self.path.exists() or (lock := self._lock()) is None:
            return False
        try:
            left = (self.path / "state.json").exists()
            self._clear()
        finally:
            self._remove(lock)
        return left

    def make_secret(self) -> Path:
        """Makes a secret; returns its file. Only for the holder."""
        file = self.path / "secret"
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(32))
        return file

    def add_drained(self, name: str) -> None:
        """Notes that this process was drained on request, and has ended."""
        with contextlib.suppress(FileNotFoundError), (self.path / "drained").open("a") as file:  # the cluster has ended
            file.write(f"{name}\n")

    def drained(self) -> list[str]:
        """Names of the processes that were drained on request; some may have been started again."""
        try:
            return list(dict.fromkeys((self.path / "drained").read_text().split()))
        except FileNotFoundError:
            return []

    def write_missing(self, reasons: Mapping[str, str]) -> None:
        """Notes why processes do not run that should, by name; only for the holder."""
        self._replace("missing", dict(reasons))

    def missing(self) -> dict[str, str]:
        """Why processes do not run that should, by name."""
        try:
            reasons: dict[str, str] = orjson.loads((self.path / "missing").read_bytes())
            return reasons
        except FileNotFoundError:
            return {}

    def write(self, state: ClusterState) -> None:
        """Writes the description; only for the holder."""
        self._replace("state.json", asdict(state))

    def _replace(self, name: str, value: Any) -> None:
        draft = self.path / f"{name}.new"
        draft.touch(mode=0o600)
        draft.write_bytes(orjson.dumps(value))
        draft.rename(self.path / name)

    def read(self) -> ClusterState | None:
        """Returns the running cluster, or None."""
        if not self.path.exists():
            return None
        lock = self._lock()
        if lock is not None:
            os.close(lock)
            return None
        return self._state()

    def _remove(self, lock: int) -> None:
        with contextlib.suppress(OSError):
            self._remove_files()
            (self.path / "lock").unlink()  # last: without it another process would take the directory for its own
            self.path.rmdir()
            self.path.parent.rmdir()
        os.close(lock)

    def _state(self) -> ClusterState | None:
        try:
            return ClusterState(**orjson.loads((self.path / "state.json").read_bytes()))
        except FileNotFoundError:
            return None
        except (TypeError, orjson.JSONDecodeError):
            raise ConfigError(
                f"{self.path / 'state.json'} was written by another version of cpd: end that cluster with Ctrl-C in its"
                " terminal or with that version's `cpd down`"
            ) from None

    def _clear(self) -> None:
        """Removes what a killed `cpd up` has left."""
        with contextlib.suppress(ConfigError):
            if stale := self._state():
                if stale.ray_dir:
                    clear_ray_dir(stale.ray_dir)
                if stale.launch:
                    _end_processes(stale.launch)
        self._remove_files()

    def _remove_files(self) -> None:
        for file in self.path.iterdir():
            if file.name != "lock":
                file.unlink(missing_ok=True)

    def _lock(self) -> int | None:
        """Returns the lock's file descriptor, or None if another process holds it."""
        while True:
            try:
                _make_private(self.path.parent)
                _make_private(self.path)
                lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # its holder has just removed a directory
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(self.path / "lock").st_ino == os.fstat(lock).st_ino:
                    return lock
            except BlockingIOError:
                os.close(lock)
                return None
            except FileNotFoundError:
                pass
            os.close(lock)


def running_clusters() -> list[str]:
    """Returns the names of this user's running clusters on this machine."""
    names = []
    for path in _root().glob("*"):
        with contextlib.suppress(ConfigError):
            if ClusterDir(path.name).read():
                names.append(path.name)
    return sorted(names)


def _root() -> Path:
    """Returns the directory of all clusters of this user."""
    return Path(os.environ.get("CPD_RUNTIME_DIR") or f"/tmp/cpd-{os.getuid()}")


def _end_processes(launch: str) -> None:
    """Waits until the processes with this mark have ended, as they do without their supervisors; kills the slow."""
    mark = f"{LAUNCH_MARK}={launch}".encode()
    deadline = time.monotonic() + GRACE_S + 1
    while marked := _marked(mark):
        if time.monotonic() > deadline:
            for pid in marked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: bytes) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{directory} must be a directory that only you can access: fix its permissions or remove it")
