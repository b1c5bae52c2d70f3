"""Reads files again when they change, so that API keys and certificates can be replaced while the router runs.

Files that can't be read or are not valid are logged once, and what was read last stays in use.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from cpd.common.errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval at which files are looked at, in seconds."""

T = TypeVar("T")

Version = tuple[int, int, int]
"""What tells two versions of a file apart: inode, time of the last change, size. A missing file has zeros. The time is
that of the inode, since a new owner or mode may make a file readable."""


class FollowedFiles(Generic[T]):
    """Files on disk that are read together.

    Args:
        what: What is in them, for the log.
        files: The files.
        read: Reads them; raises ConfigError. Called on a thread.
        use: Takes what was read. Called on the event loop.

    Raises:
        ConfigError: The files can't be read or are not valid.
    """

    def __init__(self, what: str, files: Sequence[Path], read: Callable[[], T], use: Callable[[T], None]) -> None:
        self._what = what
        self._files = files
        self._read = read
        self._use = use
        self._versions = self._look()
        self._reads_again = False
        use(read())

    async def reread(self, told: bool) -> None:
        """Reads the files if one has changed or if `told`, and uses them if they are valid."""
        # on a thread, since the files may be on a network's disk
        try:
            read = await asyncio.to_thread(self._read_changed, told)
        except ConfigError as error:
            log.error("the %s stay as they were: %s", self._what, error)
            return
        for content in read:
            self._use(content)
            log.info("the %s were read again from %s", self._what, ", ".join(map(str, self._files)))

    def _read_changed(self, told: bool) -> list[T]:
        versions = self._look()
        changed = versions != self._versions
        if not (changed or told or self._reads_again):
            return []
        self._versions = versions  # looked at before they are read: a change in between is found at the next look
        self._reads_again = False
        try:
            return [self._read()]
        except ConfigError:
            if told or not changed:
                raise
            self._reads_again = True  # the next time: somebody may be writing them
            return []

    def _look(self) -> list[Version]:
        return [_version(file) for file in self._files]


async def follow(followed: Sequence[FollowedFiles[Any]], reread: asyncio.Event) -> None:
    """Reads files again whenever they change, and all of them when `reread` is set. Runs until cancelled."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reread.wait(), POLL_S)
        told = reread.is_set()
        reread.clear()
        for files in followed:
            await files.reread(told)


def _version(file: Path) -> Version:
    try:
        stat = file.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_ctime_ns, stat.st_size
