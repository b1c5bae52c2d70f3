"""The KV cache as the scheduler sees it: where the blocks of a prompt are, and pages for new blocks.

A block is in a page, or has a producer (a running sequence, a landing, or a load from host memory), or is in host
memory only, or nowhere.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import takewhile

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostTier
from engine.scheduling import sequence
from engine.scheduling.prefix_wait import PendingBlocks


class KVCacheManager:
    """Finds, allocates and publishes blocks.

    Args:
        pool: The page pool.
        copy_page: Copies a page's content, source to target, before the next step runs.
        host: The host tier that evicted blocks may be loaded from.
        on_loaded: Called on any thread when `take_loaded` has something to do.

    Attributes:
        pending: Blocks with a producer, and the sequences that wait for them.
    """

    def __init__(
        self,
        pool: BlockPool,
        copy_page: Callable[[int, int], None],
        host: HostTier | None = None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.copy_page = copy_page
        self.pending = PendingBlocks[sequence.Sequence]()
        self._host = host
        self._on_loaded = on_loaded

    def cached_blocks(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Number of the first blocks of a prompt that are in pages or would be loaded from host memory."""
        found = len(self.pool.find(hashes))
        return found if self._host is None else found + self._host.should_load(hashes, found, num_tokens)

    def find(self, hashes: Sequence[bytes], num_tokens: int, headroom: int) -> tuple[list[int], bytes | None]:
        """Finds the first blocks of a prompt, and starts to load the next ones if that is quicker than computing them.

        Args:
            headroom: Number of pages that a load must leave available, beside those for the whole prompt.

        Returns:
            The pages of the cached blocks, and the last of the following blocks that have a producer; None if the next
            block must be computed.
        """
        found = self.pool.find(hashes)
        awaited = self.pending.last_shared(hashes, len(found))
        return found, awaited or self.load(hashes, found, num_tokens, headroom)

    def load(self, hashes: Sequence[bytes], found: list[int], num_tokens: int, headroom: int) -> bytes | None:
        """Starts to load the blocks after the pages `found` from host memory, like `find`. Returns the last of them."""
        host, first = self._host, len(found)
        if host is None:
            return None
        blocks = host.should_load(hashes, first, num_tokens)
        loading = list(takewhile(lambda block: not self._is_known(block), hashes[first : first + blocks]))
        if not loading:
            return None
        load = host.load(loading, found, blocks_for(num_tokens) - first + headroom, self._on_loaded)
        if load is None:
            return None
        self.pending.claim(load, loading)
        return loading[-1]

    def take_loaded(self) -> list[sequence.Sequence]:
        """Publishes the blocks that have been loaded from host memory. Returns the sequences that waited for them."""
        woken: list[sequence.Sequence] = []
        while self._host is not None and self._host.done:
            load, good = self._host.collect()
            woken += self.publish(load.pages[:good], load.hashes[:good])
            woken += self.pending.give_up(load)
            self.pool.release(load.prefix + load.pages)
        return woken

    def allocate(self, found: list[int], num_tokens: int, headroom: int) -> list[int] | None:
        """Allocates pages for a whole sequence. It shares the pages `found`, which have its first blocks.

        If all of it is cached, the last block is copied and the last token is computed again: its logits are needed,
        and a page that others read is never written to.

        Args:
            headroom: Number of pages that must stay available.

        Returns:
            The pages, now held. None if there are too few; the pages `found` then become the last to be evicted.
        """
        whole = len(found) * BLOCK_SIZE == num_tokens
        shared = found[:-1] if whole else found
        need = blocks_for(num_tokens) - len(shared)
        if self.pool.available_beside(shared) < need + headroom:
            self.pool.touch(shared)  # the sequence will need them soon
            return None
        self.pool.hold(shared)
        own = self.pool.take(need)
        assert own is not None, "fewer are taken than are available"
        if whole and own[0] != found[-1]:  # if the page found was the one taken, its content is in place
            self.copy_page(found[-1], own[0])
        return shared + own

    def claim(self, producer: Hashable, hashes: Sequence[bytes], *, computes: bool = False) -> None:
        """Claims the blocks that `producer` will publish.

        Args:
            computes: True if it computes them, even those that are in host memory.
        """
        self.pending.claim(producer, hashes)
        if computes and self._host is not None:
            self._host.computed(hashes)

    def publish(self, pages: list[int], hashes: list[bytes]) -> list[sequence.Sequence]:
        """Publishes full blocks in pages that the caller holds. Returns the sequences that waited for them."""
        self.pool.publish(pages, hashes)
        return self.pending.published(hashes)

    def evict_all(self, valuable: Sequence[int]) -> None:
        """Evicts all blocks, when no page has a holder.

        Args:
            valuable: Pages whose blocks are all offloaded, if there is room in host memory, however long it takes.
        """
        pool, last = self.pool, len(set(valuable))
        at_once = self._host.max_offloaded if self._host is not None else pool.num_pages
        pool.touch(valuable)
        taken: list[int] = []
        for count in (pool.available - last, *(min(at_once, last - done) for done in range(0, last, at_once))):
            pages = pool.take(count)
            assert pages is not None, "a page has a holder"
            taken += pages
        pool.release(taken)

    def _is_known(self, block_hash: bytes) -> bool:
        return self.pool.is_cached(block_hash) or self.pending.has_producer(block_hash)
