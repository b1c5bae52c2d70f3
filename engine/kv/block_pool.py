"""The page pool: who owns each page of the KV cache, and which block it holds.

    free ──take──▶ used ──release──▶ cached (if published) ──take──▶ used by another
      │              ▲      └──────▶ free   (if not)          the least recently released page is evicted first
      └──reserve──▶ reserved ──arrived──▶ used
                       ├──free_reserved──▶ free
                       └──quarantine─────▶ quarantined ──end_quarantine──▶ free

Pages in host memory have an order of eviction of their own (`host_pool.py`).

Every page has exactly one owner state:

| state       | owner                               | may be written by          | leaves the state when        |
| free        | nobody                              | nobody                     | taken or reserved            |
| cached      | the cache, evictable                | nobody                     | found again, or evicted      |
| used        | its holders (sequences, pins, ...)  | the sequence computing it, | the last holder releases it  |
|             |                                     | or a load into it          |                              |
| reserved    | a landing                           | another worker, any time   | its content arrived, or not  |
| quarantined | a cancelled landing                 | perhaps another worker     | no write can come any more   |

Whether the content is valid is a separate matter: a used or cached page with a hash holds that whole block and can be
found by the hash. Free pages are taken before cached ones, and cached ones from the least to the most recently used.

A page that becomes cached enters the end of a queue under a new number. When it is found again, only its number is
cleared, and the queue's old entry is skipped later: that is cheaper than taking it out of the middle.
"""

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
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
    """Where the pool offloads evicted blocks."""

    def offload(self, pages: list[int], hashes: list[bytes]) -> list[bytes]:
        """Takes the content of these pages, least recently used first, before they are used for other content.

        Returns:
            The blocks that are in no tier any more.
        """

    def has_offloaded(self, block_hash: bytes) -> bool:
        """True if a block is in this tier."""

    def offloaded_hashes(self) -> list[bytes]:
        """All blocks in this tier."""


class BlockPool:
    """Pages `0 .. num_pages - 1` and the index of the blocks in them.

    Attributes:
        releases: Number of times that pages became available.
        publications: Number of times that blocks became findable.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owner = bytearray(num_pages)
        self._counts = [num_pages, 0, 0, 0, 0]  # number of pages of each owner
        self._refcount = array("i", bytes(4 * num_pages))
        self._hash: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free_pages = list(range(num_pages - 1, -1, -1))  # the last one is taken first
        self._queue: deque[int] = deque()  # cached pages and outdated entries, by number
        self._first_number = 0  # the number of the queue's first entry
        self._number = array("q", [-1]) * num_pages  # each page's number; -1 unless cached
        self._events: list[CacheEvent] = []
        self.releases = 0
        self.publications = 0
        self._offload_tier: OffloadTier | None = None

    def offload_to(self, tier: OffloadTier) -> None:
        """Sets the tier that takes evicted blocks, before any page is used."""
        self._offload_tier = tier

    def lost(self, block_hash: bytes) -> None:
        """Records that a block is no longer offloaded."""
        if block_hash not in self._page_of:
            self._record(Tier.NONE, [block_hash])

    @property
    def available(self) -> int:
        """Number of pages that `take` and `reserve` can give: free and cached ones."""
        return self._counts[0] + self._counts[1]

    def available_beside(self, pages: Sequence[int]) -> int:
        """Number of pages that are available once these pages are held."""
        return self.available - len({page for page in pages if not self._refcount[page]})

    def refcounts(self) -> npt.NDArray[np.int32]:
        """Number of holders of each page. [num_pages]"""
        return np.array(self._refcount, dtype=np.int32)

    def take(self, count: int) -> list[int] | None:
        """Takes pages, to be used by one holder; their content is undefined. Returns None if there are too few."""
        pages = self._claim(count, Owner.USED)
        for page in pages or ():
            self._refcount[page] = 1
        return pages

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Finds the pages of the longest cached prefix of a hash chain. They are not held."""
        pages: list[int] = []
        try:  # noqa: SIM105 - `suppress` takes longer than the look-up
            pages.extend(map(self._page_of.__getitem__, hashes))
        except KeyError:
            pass  # the pages before the missing one stay in the list
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to used or cached pages."""
        refcount, number = self._refcount, self._number
        idle = {page for page in pages if not refcount[page]}  # a set: the hashes from a router may repeat
        self._move(idle, Owner.CACHED, Owner.USED)
        for page in idle:
            number[page] = -1
        for page in pages:
            refcount[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from pages in block order. The last blocks will be evicted first."""
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
        """Makes these pages, in block order, the last to be evicted, if they are cached."""
        self._enqueue([page for page in reversed(pages) if not self._refcount[page]])

    def publish(self, pages: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Makes complete used pages findable, except those whose block is in another page already."""
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

    def is_cached(self, block_hash: bytes) -> bool:
        """True if a block is in a page."""
        return block_hash in self._page_of

    def reserve(self, count: int) -> list[int] | None:
        """Reserves pages for another worker to write. Returns None if there are too few."""
        return self._claim(count, Owner.RESERVED)

    def arrived(self, pages: Collection[int]) -> None:
        """Makes reserved pages, whose content has arrived, used by one holder."""
        self._move(pages, Owner.RESERVED, Owner.USED)
        for page in pages:
            self._refcount[page] = 1

    def free_reserved(self, pages: Collection[int]) -> None:
        """Frees reserved pages, into which nothing will be written any more."""
        self._free(pages, Owner.RESERVED)

    def quarantine(self, pages: Collection[int]) -> None:
        """Quarantines reserved pages, into which a write may still come."""
        self._move(pages, Owner.RESERVED, Owner.QUARANTINED)

    def end_quarantine(self, pages: Collection[int]) -> None:
        """Frees quarantined pages, into which no write can come any more."""
        self._free(pages, Owner.QUARANTINED)

    def counts(self) -> PoolCounts:
        """Number of pages in each owner state."""
        return PoolCounts(*self._counts)

    def take_events(self) -> list[CacheEvent]:
        """Takes the changes since the last call, in order: blocks in pages, in the offload tier, or lost."""
        events, self._events = self._events, []
        return events

    def cached_hashes(self, tier: Tier) -> list[bytes]:
        """All blocks in this tier. Blocks that are in a page, too, are not in `HOST`."""
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
            self._record(Tier.NONE, lost)  # first, so that no more blocks are offloaded than there is room for
            self._record(Tier.HOST, [gone for gone in evicted if tier.has_offloaded(gone)])
        else:
            self._record(Tier.NONE, evicted)
        return free + cached

    def _enqueue(self, pages: list[int]) -> None:
        """Puts cached pages at the end of the queue, in the order of eviction."""
        queue, numbers = self._queue, self._number
        for number, page in enumerate(pages, self._first_number + len(queue)):
            numbers[page] = number
        queue.extend(pages)
        if len(queue) > 2 * self.num_pages:  # nearly all entries may be outdated
            self._queue, cached = deque(), self._cached_pages()
            self._enqueue(cached)

    def _dequeue(self, count: int) -> list[int]:
        """Takes cached pages from the front of the queue."""
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
        """The cached pages, from the least to the most recently used."""
        numbers = self._number
        return [page for number, page in enumerate(self._queue, self._first_number) if numbers[page] == number]

    def _move(self, pages: Collection[int], source: Owner, target: Owner) -> None:
        """Gives pages to another owner. All at once, because attributes of an Enum are slow."""
        owner, before, after = self._owner, int(source), int(target)
        for page in pages:
            if owner[page] != before:
                raise AssertionError(f"page {page} is {Owner(owner[page]).name.lower()}, not {source.name.lower()}")
            owner[page] = after
        self._counts[before] -= len(pages)
        self._counts[after] += len(pages)

    def _free(self, pages: Collection[int], source: Owner) -> None:
        """Frees pages. The last one will be taken first."""
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
