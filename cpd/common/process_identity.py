"""Which process a peer is, and proof that it has ended.

A stopped process that continues goes on with what it was stopped in. Only its end proves that it will not, and a pidfd
shows that without mistaking a new process for it.
"""

import asyncio
import errno
import os
import select
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process among all processes of all machines.

    Attributes:
        boot: Random number of the machine's kernel, new at each boot, 16 bytes.
        pid_namespace: Namespace of `pid`.
        pid: Process ID.
        started: Start time, in clock ticks since boot.
    """

    boot: bytes
    pid_namespace: int
    pid: int
    started: int

    @classmethod
    def own(cls) -> "ProcessIdentity":
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The process with this ID in the own namespace."""
        boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        return cls(boot, os.stat("/proc/self/ns/pid").st_ino, pid, _started(pid))

    def on_same_host(self, other: "ProcessIdentity") -> bool:
        """True if both run on one machine."""
        return self.boot == other.boot

    def sees(self, other: "ProcessIdentity") -> bool:
        """True if both run on one machine and in one PID namespace, so that each can tell when the other has ended."""
        return self.on_same_host(other) and self.pid_namespace == other.pid_namespace

    @property
    def alive(self) -> bool:
        """True if this process, which must be of this machine, runs or is stopped. A zombie has ended."""
        if (pidfd := self.open()) is None:
            return False
        try:
            return not _has_ended(pidfd)
        finally:
            os.close(pidfd)

    def open(self) -> int | None:
        """A pidfd of this process, which must be of this machine. The caller closes it. None if it has ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # the ID is that of another process's thread by now
                return None
            raise
        try:
            # The ID may be another process's by now. If this is the right one, the pidfd stays bound to it.
            is_the_one = _started(self.pid) == self.started
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile, or another user's, which /proc may hide
            is_the_one = not _has_ended(pidfd)
        if is_the_one:
            return pidfd
        os.close(pidfd)
        return None


async def wait_until_ended(process: ProcessIdentity) -> None:
    """Returns when this process of this machine has ended: none of its system calls is under way any more."""
    pidfd = process.open()
    if pidfd is None:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)  # readable once all threads of the process have ended
    return bool(poll.poll(0))


def _started(pid: int) -> int:
    """Start time of a process. Raises FileNotFoundError if there is none with this ID."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
