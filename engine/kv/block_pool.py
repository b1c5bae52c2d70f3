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
| used        | its holders (sequences, pins, ...)  | the sequence computing it, | the last holder releases it  |
|             |                                     | or a copy of what it had   |                              |
| reserved    | a landing                           | another worker, any time   | its content arrived, or not  |
| quarantined | a cancelled landing                 | perhaps another worker     | no write can come any more   |

Whether the content is valid is a separate matter: a page that is used or cached and has a hash holds that whole
block and can be found by it. Reserving takes evictable pages too. Free pages are taken before cached ones, and these
from the least to the most recently used.

Every time a page becomes cached it enters the end of one queue, under a number of its own. It stays there when somebody
finds it: the number is then no longer the page's, which is cheaper than taking it out of the middle.
"""

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cpd.common.blocks import Tier
from engine.types import CacheEvent, PoolCounts


class Owner(IntEnum):
    """Owner state of a page."""

    FREE = 0
    CACHED = 1
    USED = 2
    RESERVED = 3
    QUARANTINED = 4


class OffloadTier(Protocol):
    """Where blocks go that the pool evicts."""

    def offload(self, pages: list[int], hashes: list[bytes]) -> list[bytes]:
        """These pages, least recently used first, are about to be used for other content.

        Returns:
            The blocks that are in no tier any more.
        """

    def has_offloaded(self, block_hash: bytes) -> bool:
        """Whether a block is in this tier."""

    def offloaded_hashes(self) -> list[bytes]:
        """All blocks in this tier."""


class BlockPool:
    """Pages `0 .. num_pages - 1` and the index of the blocks that are in them.

    Attributes:
        releases: How often pages became available so far.
        publications: How often blocks became findable so far.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owner = bytearray(num_pages)
        self._counts = [num_pages, 0, 0, 0, 0]  # pages of each owner
        self._refcount = array("i", bytes(4 * num_pages))
        self._hash: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free_pages = list(range(num_pages - 1, -1, -1))  # the last one is taken first
        self._queue: deque[int] = deque()  # of cached pages, and of numbers that are no page's any more
        self._first_number = 0  # of the queue
        self._number = array("q", [-1]) * num_pages  # of a cached page in the queue
        self._events: list[CacheEvent] = []
        self.releases = 0
        self.publications = 0
        self._offload_tier: OffloadTier | None = None

    def offload_to(self, tier: OffloadTier) -> None:
        """Has evicted blocks offloaded. At the start."""
        self._offload_tier = tier

    def lost(self, block_hash: bytes) -> None:
        """A block is offloaded no more."""
        if block_hash not in self._page_of:
            self._record(Tier.NONE, [block_hash])

    @property
    def available(self) -> int:
        """Pages that `take` and `reserve` can give: free and cached ones."""
        return self._counts[0] + self._counts[1]

    def available_beside(self, pages: Sequence[int]) -> int:
        """Pages that are available when these have been held."""
        return self.available - len({page for page in pages if not self._refcount[page]})

    def refcounts(self) -> npt.NDArray[np.int32]:
        """How many holders each page has. [num_pages]"""
        return np.array(self._refcount, dtype=np.int32)

    def take(self, count: int) -> list[int] | None:
        """Makes pages used by one holder, content undefined. None, and nothing changes, if there are too few."""
        pages = self._claim(count, Owner.USED)
        for page in pages or ():
            self._refcount[page] = 1
        return pages

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages of the longest prefix of a hash chain that is in the cache. They are not held."""
        pages: list[int] = []
        with suppress(KeyError):  # those before the one that is missing stay in the list
            pages.extend(map(self._page_of.__getitem__, hashes))
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to pages that are used or cached."""
        refcount, number = self._refcount, self._number
        idle = {page for page in pages if not refcount[page]}  # whoever sent the hashes may have sent one twice
        self._move(idle, Owner.CACHED, Owner.USED)
        for page in idle:
            number[page] = -1
        for page in pages:
            refcount[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from pages in block order. The last blocks will be evicted first."""
        refcount, hashes = self._refcount, self._hash
        free: list[int] = []
        cached: list[int] = []
        for page in reversed(pages):
            refcount[page] = count = refcount[page] - 1
            if count <= 0:
                if count < 0:
                    raise AssertionError(f"page {page} was released more often than held")
                (free if hashes[page] is None else cached).append(page)
        if free:
            self._free(free, Owner.USED)
        if cached:
            self._move(cached, Owner.USED, Owner.CACHED)
            self._enqueue(cached)
            self.releases += 1

    def touch(self, pages: Sequence[int]) -> None:
        """Makes those of these pages, in block order, that are cached the last to be evicted."""
        self._enqueue([page for page in reversed(pages) if not self._refcount[page]])

    def publish(self, pages: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """Makes used pages, whose content is complete, findable; but not those whose block another page has already.

        Returns:
            How many of them are findable now.
        """
        refcount, hashes, page_of = self._refcount, self._hash, self._page_of
        new = []
        for page, block_hash in zip(pages, block_hashes, strict=True):
            if refcount[page] == 0 or hashes[page] is not None:
                raise AssertionError(f"page {page} is not in use or holds another block")
            if page_of.setdefault(block_hash, page) == page:
                hashes[page] = block_hash
                new.append(block_hash)
        self._record(Tier.PAGES, new)
        self.publications += bool(new)
        return len(new)

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether a block can be found in a page."""
        return block_hash in self._page_of

    def reserve(self, count: int) -> list[int] | None:
        """Sets pages aside for another worker to write. None, and nothing changes, if there are too few."""
        return self._claim(count, Owner.RESERVED)

    def arrived(self, pages: Collection[int]) -> None:
        """Reserved pages have their content: used by one holder."""
        self._move(pages, Owner.RESERVED, Owner.USED)
        for page in pages:
            self._refcount[page] = 1

    def free_reserved(self, pages: Collection[int]) -> None:
        """Nothing will be written into these reserved pages any more."""
        self._free(pages, Owner.RESERVED)

    def quarantine(self, pages: Collection[int]) -> None:
        """A write into these reserved pages may still come."""
        self._move(pages, Owner.RESERVED, Owner.QUARANTINED)

    def end_quarantine(self, pages: Collection[int]) -> None:
        """No write into these quarantined pages can come any more."""
        self._free(pages, Owner.QUARANTINED)

    def counts(self) -> PoolCounts:
        """Pages by owner state."""
        return PoolCounts(*self._counts)

    def take_events(self) -> list[CacheEvent]:
        """Which blocks went into pages, to the offload tier, or were lost since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_hashes(self, tier: Tier) -> list[bytes]:
        """All blocks that are in pages, or offloaded and in no page."""
        if tier is Tier.PAGES:
            return list(self._page_of)
        offloaded = self._offload_tier.offloaded_hashes() if self._offload_tier is not None else []
        return [block_hash for block_hash in offloaded if block_hash not in self._page_of]

    def check_integrity(self) -> None:
        """Raises AssertionError unless all records agree. About 10 ms for 100,000 pages: for idle moments."""
        owner = np.frombuffer(self._owner, dtype=np.uint8)
        available = np.array(self._free_pages + self._cached_pages(), dtype=np.int64)
        if np.bincount(owner, minlength=len(Owner)).tolist() != self._counts:
            raise AssertionError("pages are miscounted")
        if len(available) != self.counts().free + self.counts().cached or (owner[available] > Owner.CACHED).any():
            raise AssertionError("free and cached pages are not those that can be taken")
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
        if count > self.available:
            return None
        free = self._free_pages[-1 : -count - 1 : -1]
        if free:
            del self._free_pages[-len(free) :]
            self._move(free, Owner.FREE, owner)
            if len(free) == count:
                return free
        cached = self._dequeue(count - len(free))
        self._move(cached, Owner.CACHED, owner)
        hashes, page_of = self._hash, self._page_of
        evicted = []
        for page in cached:
            block_hash, hashes[page] = hashes[page], None
            assert block_hash is not None, "a page is cached without a block"
            del page_of[block_hash]
            evicted.append(block_hash)
        tier = self._offload_tier
        if tier is not None and evicted:
            lost = tier.offload(cached, evicted)
            self._record(Tier.NONE, lost)  # first: at no time are more blocks offloaded than there is room for
            self._record(Tier.HOST, [gone for gone in evicted if tier.has_offloaded(gone)])
        else:
            self._record(Tier.NONE, evicted)
        return free + cached

    def _enqueue(self, pages: list[int]) -> None:
        """These pages are cached now, the first of them to be evicted first."""
        queue, numbers = self._queue, self._number
        for number, page in enumerate(pages, self._first_number + len(queue)):
            numbers[page] = number
        queue.extend(pages)
        if len(queue) > 2 * self.num_pages:  # nearly all numbers may be no page's any more
            self._queue, cached = deque(), self._cached_pages()
            self._enqueue(cached)

    def _dequeue(self, count: int) -> list[int]:
        """Takes so many cached pages from the queue."""
        queue, numbers, number = self._queue, self._number, self._first_number
        pages: list[int] = []
        while len(pages) < count:
            page = queue.popleft()
            if numbers[page] == number:
                numbers[page] = -1
                pages.append(page)
            number += 1
        self._first_number = number
        return pages

    def _cached_pages(self) -> list[int]:
        """From the least to the most recently used."""
        numbers = self._number
        return [page for number, page in enumerate(self._queue, self._first_number) if numbers[page] == number]

    def _move(self, pages: Collection[int], source: Owner, target: Owner) -> None:
        """Gives pages to another owner, all at once because attributes of an Enum are slow."""
        owner, before, after = self._owner, int(source), int(target)
        for page in pages:
            if owner[page] != before:
                raise AssertionError(f"page {page} is {Owner(owner[page]).name.lower()}, not {source.name.lower()}")
            owner[page] = after
        self._counts[before] -= len(pages)
        self._counts[after] += len(pages)

    def _free(self, pages: Collection[int], source: Owner) -> None:
        """These will be taken first, the last of them before the others."""
        self._move(pages, source, Owner.FREE)
        self._free_pages.extend(pages)
        self.releases += 1

    def _record(self, tier: Tier, block_hashes: list[bytes]) -> None:
        if not block_hashes:
            return
        if self._events and self._events[-1].tier is tier:
            self._events[-1].hashes += block_hashes
        else:
            self._events.append(CacheEvent(tier, block_hashes))
