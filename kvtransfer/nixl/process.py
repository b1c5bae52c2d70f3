"""Which process is at the other end of a connection, and proof that it is gone.

A stopped process that continues goes on with the write it was stopped in. Only its end proves that it will not, and
a pidfd tells that without mistaking a new process for it.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process among all of all machines.

    Attributes:
        boot: Of the machine's kernel, 16 bytes, random at each boot.
        pid_namespace: In which `pid` means something.
        pid: Its number there.
        started: When it began, in clock ticks since boot.
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
        """The process of this number, in the own namespace."""
        boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        return cls(boot, os.stat("/proc/self/ns/pid").st_ino, pid, _started(pid))

    def beside(self, other: "ProcessIdentity") -> bool:
        """Whether both are of one machine."""
        return self.boot == other.boot

    def sees(self, other: "ProcessIdentity") -> bool:
        """Whether both are of one machine and the same PID namespace, so that the end of one is proven to the other."""
        return self.beside(other) and self.pid_namespace == other.pid_namespace

    @property
    def alive(self) -> bool:
        """Whether this process of this machine runs."""
        if (pidfd := self.open()) is None:
            return False
        os.close(pidfd)
        return True

    def open(self) -> int | None:
        """A pidfd of this process of this machine, which is the caller's to close. None: it has ended."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        try:
            # The number may be another process's by now. If this is the right one, the pidfd stands for it from now on.
            if _started(self.pid) == self.started:
                return pidfd
        except (FileNotFoundError, ProcessLookupError):
            pass  # /proc has nobody of that number, or not any more
        os.close(pidfd)
        return None


async def gone(process: ProcessIdentity) -> None:
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


def _started(pid: int) -> int:
    """Raises FileNotFoundError if there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
