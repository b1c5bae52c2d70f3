"""Reads the key file again when it changes, so that keys can be added, replaced and withdrawn while the router runs.

A file that can't be read or is not valid is logged once, and the keys that were read last stay valid.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from cpd.common.errors import ConfigError
from router.api.tenants import KeyEntry, Keys, read_keys

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval at which the file is looked at, in seconds."""

Version = tuple[int, int, int]
"""What tells two versions of a file apart: inode, time of the last change, size. A missing file has zeros."""


class KeyFile:
    """A key file on disk.

    Raises:
        ConfigError: The file can't be read or is not valid.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version = self._look()
        self.entries = read_keys(file)

    async def follow(self, keys: Keys, reread: asyncio.Event) -> None:
        """Replaces the entries of `keys` whenever the file changes, and when `reread` is set. Runs until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reread.wait(), POLL_S)
            told = reread.is_set()
            reread.clear()
            # on a thread, since the file may be on a network's disk
            if (entries := await asyncio.to_thread(self._changed, told)) is not None:
                keys.replace(entries)
                log.info("the key file %s was read again: %d keys", self._file, len(entries))

    def _changed(self, told: bool) -> list[KeyEntry] | None:
        """Reads the file if it has changed or if `told`. Returns None if it has no new valid version."""
        version = self._look()
        if version == self._version and not told:
            return None
        self._version = version  # looked at before it is read: a change in between is found at the next look
        try:
            return read_keys(self._file)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return None

    def _look(self) -> Version:
        try:
            stat = self._file.stat()
        except OSError:
            return 0, 0, 0
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
