"""Landings: pages that another worker fills with a prompt's keys and values, and how the request goes on from there.

    reserve ──▶ live ──activate────▶ (the pages belong to a running sequence)
                 ├───add_to_cache──▶ (the pages are in the cache)
                 └─────cancel──────▶ (the pages are free), or quarantined ──end_quarantine──▶ (the pages are free)

A live landing holds the cached first blocks of the prompt, owns a page for each further block, and keeps a row of the
sequence table free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from cpd.common.blocks import blocks_for
from engine.kv.block_pool import BlockPool
from engine.output_processor import OutputProcessor, advanced
from engine.scheduling.scheduler import Scheduler
from engine.types import Output, Request, Reservation


@dataclass(eq=False, slots=True)
class _Landing:
    reservation: Reservation
    prefix: list[int]
    quarantined: bool = False


class Landings:
    """The live and the quarantined landings of an engine.

    Args:
        settle: Returns when no queued copy reads or writes free pages any more.
    """

    def __init__(
        self, pool: BlockPool, scheduler: Scheduler, outputs: OutputProcessor, settle: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._outputs = outputs
        self._settle = settle
        self._landings: dict[int, _Landing] = {}
        self._generations = count(1)

    def __bool__(self) -> bool:
        return bool(self._landings)

    @property
    def num_live(self) -> int:
        """Number of landings whose pages may still arrive."""
        return sum(not landing.quarantined for landing in self._landings.values())

    def reserve(self, request: Request, blocks: int | None = None) -> Reservation | None:
        """Reserves pages for the part of a prompt that is not cached, and holds the cached part.

        Args:
            blocks: Reserve only for this many of the first full blocks; None: for the whole prompt.

        Returns:
            None if there is no room now (try again later), or if the first `blocks` blocks are all cached.

        Raises:
            ValueError: The request can never be served here.
        """
        self._outputs.check(request)
        hashes = request.block_hashes[:blocks]
        spare = self._scheduler.spare_for_reservation()
        if spare is None:
            return None
        prefix = self._pool.find(hashes)
        if len(prefix) == blocks:
            return None
        missing = (blocks_for(len(request.token_ids)) if blocks is None else blocks) - len(prefix)
        if self._pool.available_beside(prefix) < missing + spare:
            return None
        self._pool.hold(prefix)
        pages = self._pool.reserve(missing)
        assert pages is not None, "fewer are reserved than are available"
        number = next(i for i in count() if i not in self._landings)
        reservation = Reservation(number, next(self._generations), len(prefix), pages)
        self._landings[number] = _Landing(reservation, prefix)
        self._scheduler.reserve_row(reservation.generation, hashes[len(prefix) :])
        self._settle()  # a queued copy may still read or write these pages
        return reservation

    def activate(self, reservation: Reservation, request: Request, first: Sequence[Output]) -> list[Output]:
        """Continues a request whose pages have all arrived, each choice after its first tokens.

        Args:
            first: The first tokens of each choice, from the worker that computed the prompt. Choices that are missing
                or finished there are dropped.

        Returns:
            An output without tokens for each choice that ends here at once.

        Raises:
            ValueError: The reservation is not live, or a first token does not follow the request's grammar.
        """
        going_on = {output.choice: output.token_ids for output in first if output.finish is None}
        constraints = advanced(self._outputs.constraint_after(request), going_on)
        if error := next((one.error for one in constraints.values() if one.error), ""):
            raise ValueError(f"a first token does not follow its grammar: {error}")
        pages = self._arrived(reservation)
        seq = self._outputs.open(request, list(going_on))
        seq.first_token_sent = True
        self._scheduler.start(seq, pages, seq.num_tokens, reservation.first_block)
        self._scheduler.publish(seq)
        ended = []
        for choice, token_ids in tuple(going_on.items()):
            finish = self._outputs.finish_of(request, seq.num_tokens + len(token_ids), token_ids[-1])
            if finish is not None:
                ended.append(Output(request.id, choice, [], [], finish))
                del going_on[choice]
        self._outputs.fork(seq, going_on, constraints)
        return ended

    def add_to_cache(self, reservation: Reservation, request: Request) -> None:
        """Puts the first full blocks of a prompt, whose pages have all arrived, into the cache.

        Raises:
            ValueError: The reservation is not live.
        """
        pages = self._arrived(reservation)
        first = reservation.first_block
        self._scheduler.publish_pages(pages[first:], request.block_hashes[first : len(pages)])
        self._pool.release(pages)

    def cancel(self, reservation: Reservation, *, quarantine: bool) -> None:
        """Gives up a live reservation. With `quarantine`, its pages stay unused until `end_quarantine`.

        Raises:
            ValueError: The reservation is not live.
        """
        landing = self._end(reservation)
        self._pool.release(landing.prefix)
        if quarantine:
            self._pool.quarantine(reservation.pages)
            landing.quarantined = True
            self._landings[reservation.id] = landing
        else:
            self._pool.free_reserved(reservation.pages)
        self._scheduler.free_reserved_row(reservation.generation)

    def end_quarantine(self, reservation: Reservation) -> None:
        """Frees the pages of a cancelled reservation, because no write into them can come any more.

        Raises:
            ValueError: The reservation is not in quarantine.
        """
        self._get(reservation, quarantined=True)
        del self._landings[reservation.id]
        self._pool.end_quarantine(reservation.pages)

    def held_pages(self) -> list[int]:
        """The cached pages that live landings hold, each as often as it is held."""
        return [page for landing in self._landings.values() if not landing.quarantined for page in landing.prefix]

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the landings' pages are reserved or quarantined."""
        counts = self._pool.counts()
        if counts.reserved != self._num_pages(quarantined=False):
            raise AssertionError("pages are reserved for no landing")
        if counts.quarantined != self._num_pages(quarantined=True):
            raise AssertionError("pages are quarantined for no landing")

    def _num_pages(self, *, quarantined: bool) -> int:
        landings = self._landings.values()
        return sum(len(landing.reservation.pages) for landing in landings if landing.quarantined is quarantined)

    def _arrived(self, reservation: Reservation) -> list[int]:
        """Ends a live landing whose pages have arrived. Returns the pages of the whole prompt, held by the caller."""
        landing = self._end(reservation)
        self._pool.arrived(reservation.pages)
        self._scheduler.free_reserved_row(reservation.generation)
        return landing.prefix + reservation.pages

    def _end(self, reservation: Reservation) -> _Landing:
        landing = self._get(reservation, quarantined=False)
        del self._landings[reservation.id]
        return landing

    def _get(self, reservation: Reservation, *, quarantined: bool) -> _Landing:
        landing = self._landings.get(reservation.id)
        if landing is None or landing.reservation != reservation or landing.quarantined != quarantined:
            raise ValueError(
                f"reservation {reservation.id} (generation {reservation.generation}) is not "
                f"{'in quarantine' if quarantined else 'live'}"
            )
        return landing
