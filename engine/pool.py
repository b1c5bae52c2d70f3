"""The page pool: who owns each page of the KV cache, and which block's content is in it.

    free ──take──▶ used ──release──▶ cached (if published) ──take──▶ used by another
      │              ▲      └──────▶ free   (if not)          the least recently released page is evicted first
      └──reserve──▶ reserved ──arrived──▶ used
                       ├──free_reserved──▶ free
                       └──quarantine─────▶ quarantined ──end_quarantine──▶ free

Every page has exactly one owner state:

| state       | owner                               | may be written by          | leaves the state when        |
| free        | nobody                              | nobody                     | taken or reserved            |
| cached      | the cache, evictable                | nobody                     | found again, or evicted      |
| used        | its holders (sequences, pins, ...)  | the sequence computing it  | the last holder releases it  |
| reserved    | a landing                           | another worker, any time   | its content arrived, or not  |
| quarantined | a cancelled landing                 | perhaps another worker     | no write can come any more   |

Whether the content is valid is a separate matter: a page that is used or cached and has a hash holds that whole
block and can be found by it. Reserving takes evictable pages too. The order of free and cached pages is one queue,
free ones first, then from the least to the most recently used.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from engine.types import CacheEvent, PoolCounts


class Owner(IntEnum):
    """Owner state of a page."""

    FREE = 0
    CACHED = 1
    USED = 2
    RESERVED = 3
    QUARANTINED = 4


class BlockPool:
    """Pages `0 .. num_pages - 1` and the index of the blocks that are in them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owner = bytearray(num_pages)
        self._counts = [num_pages, 0, 0, 0, 0]  # pages of each owner
        self._refcount = array("i", bytes(4 * num_pages))
        self._hash: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._available: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._events: list[CacheEvent] = []

    @property
    def available(self) -> int:
        """Pages that `take` and `reserve` can give: free and cached ones."""
        return len(self._available)

    def refcounts(self) -> npt.NDArray[np.int32]:
        """How many holders each page has. [num_pages]"""
        return np.array(self._refcount, dtype=np.int32)

    def take(self, count: int) -> list[int] | None:
        """Makes pages used by one holder, content undefined. None, and nothing changes, if there are too few."""
        pages = self._claim(count, Owner.USED)
        if pages is not None:
            for page in pages:
                self._refcount[page] = 1
        return pages

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages of the longest prefix of a hash chain that is in the cache. They are not held."""
        pages = []
        for block_hash in hashes:
            page = self._page_of.get(block_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are used or cached."""
        for page in pages:
            if self._owner[page] == Owner.CACHED:
                del self._available[page]
                self._give(page, Owner.USED)
            elif self._owner[page] != Owner.USED:
                raise AssertionError(f"page {page} is {Owner(self._owner[page]).name.lower()}, so it can't be held")
            self._refcount[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from pages in block order. The last blocks will be evicted first."""
        for page in reversed(pages):
            count = self._refcount[page] - 1
            if count < 0:
                raise AssertionError(f"page {page} was released more often than held")
            self._refcount[page] = count
            if count == 0:
                if self._hash[page] is None:
                    self._free(page)
                else:
                    self._give(page, Owner.CACHED)
                    self._available[page] = None

    def publish(self, page: int, block_hash: bytes) -> bool:
        """Makes a used page, whose content is complete, findable. False if another page has that block already."""
        if self._owner[page] != Owner.USED or self._hash[page] is not None:
            raise AssertionError(f"page {page} is not in use or holds another block")
        if block_hash in self._page_of:
            return False
        self._page_of[block_hash] = page
        self._hash[page] = block_hash
        self._record(False, block_hash)
        return True

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether a block can be found."""
        return block_hash in self._page_of

    def reserve(self, count: int) -> list[int] | None:
        """Sets pages aside for another worker to write. None, and nothing changes, if there are too few."""
        return self._claim(count, Owner.RESERVED)

    def arrived(self, pages: Iterable[int]) -> None:
        """Reserved pages have their content: used by one holder."""
        for page in pages:
            self._leave(page, Owner.RESERVED)
            self._give(page, Owner.USED)
            self._refcount[page] = 1

    def free_reserved(self, pages: Iterable[int]) -> None:
        """Nothing will be written into these reserved pages any more."""
        for page in pages:
            self._leave(page, Owner.RESERVED)
            self._free(page)

    def quarantine(self, pages: Iterable[int]) -> None:
        """A write into these reserved pages may still come."""
        for page in pages:
            self._leave(page, Owner.RESERVED)
            self._give(page, Owner.QUARANTINED)

    def end_quarantine(self, pages: Iterable[int]) -> None:
        """No write into these quarantined pages can come any more."""
        for page in pages:
            self._leave(page, Owner.QUARANTINED)
            self._free(page)

    def counts(self) -> PoolCounts:
        """Pages by owner state."""
        return PoolCounts(*self._counts)

    def take_events(self) -> list[CacheEvent]:
        """Blocks that became findable or were evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_hashes(self) -> list[bytes]:
        """All blocks that can be found."""
        return list(self._page_of)

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree. About 10 ms for 100,000 pages: for idle moments."""
        owner = np.frombuffer(self._owner, dtype=np.uint8)
        available = np.fromiter(self._available, dtype=np.int64, count=len(self._available))
        if np.bincount(owner, minlength=len(Owner)).tolist() != self._counts:
            raise AssertionError("pages are miscounted")
        if len(available) != self.counts().free + self.counts().cached or (owner[available] > Owner.CACHED).any():
            raise AssertionError("the queue does not consist of the free and the cached pages")
        if ((self.refcounts() > 0) != (owner == Owner.USED)).any():
            raise AssertionError("pages are in use without a holder, or held but not in use")
        if list(self._page_of) != [self._hash[page] for page in self._page_of.values()]:
            raise AssertionError("the index points to pages that hold other blocks")
        if len(self._page_of) != self.num_pages - self._hash.count(None):
            raise AssertionError("pages hold blocks that can't be found")
        findable = np.fromiter(self._page_of.values(), dtype=np.int64, count=len(self._page_of))
        if np.count_nonzero(owner[findable] == Owner.CACHED) != self.counts().cached:
            raise AssertionError("a page is cached without a block")
        if not np.isin(owner[findable], (Owner.CACHED, Owner.USED)).all():
            raise AssertionError("a page has a block but is neither cached nor in use")

    def _claim(self, count: int, owner: Owner) -> list[int] | None:
        if count > len(self._available):
            return None
        pages = []
        for _ in range(count):
            page, _ = self._available.popitem(last=False)
            block_hash = self._hash[page]
            if block_hash is not None:
                del self._page_of[block_hash]
                self._hash[page] = None
                self._record(True, block_hash)
            self._give(page, owner)
            pages.append(page)
        return pages

    def _give(self, page: int, owner: Owner) -> None:
        self._counts[self._owner[page]] -= 1
        self._counts[owner] += 1
        self._owner[page] = owner

    def _leave(self, page: int, owner: Owner) -> None:
        if self._owner[page] != owner:
            raise AssertionError(f"page {page} is {Owner(self._owner[page]).name.lower()}, not {owner.name.lower()}")

    def _free(self, page: int) -> None:
        self._give(page, Owner.FREE)
        self._available[page] = None
        self._available.move_to_end(page, last=False)

    def _record(self, removed: bool, block_hash: bytes) -> None:
        if self._events and self._events[-1].removed == removed:
            self._events[-1].hashes.append(block_hash)
        else:
            self._events.append(CacheEvent(removed, [block_hash]))
