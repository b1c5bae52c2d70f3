"""Landing reservations: pages for a prompt, or its first blocks, that come from another worker.

    reserve ──▶ live ──finish──▶ (its pages belong to a sequence)
                 └────cancel──▶ (pages free), or quarantined ──end_quarantine──▶ (pages free)

A live reservation holds the cached first blocks of the prompt, and owns a page for each further block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from engine.kv.block_pool import BlockPool
from engine.types import Reservation


@dataclass(eq=False, slots=True)
class _Landing:
    reservation: Reservation
    prefix: list[int]
    quarantined: bool = False


class LandingReservations:
    """The pages of `pool` that are set aside, and for what."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._landings: dict[int, _Landing] = {}
        self._generations = count(1)

    @property
    def num_live(self) -> int:
        """Reservations whose pages may still be written."""
        return sum(not landing.quarantined for landing in self._landings.values())

    def reserve(self, hashes: Sequence[bytes], num_blocks: int, spare: int) -> Reservation | None:
        """Sets pages aside for those of a prompt's blocks that are not cached.

        Args:
            hashes: Of the full blocks.
            num_blocks: All blocks that are wanted.
            spare: Pages that must stay available.

        Returns:
            The reservation; None, and nothing changes, if there are too few pages.
        """
        prefix = self._pool.find(hashes)
        missing = num_blocks - len(prefix)
        if self._pool.available_beside(prefix) < missing + spare:
            return None
        self._pool.hold(prefix)
        pages = self._pool.reserve(missing)
        assert pages is not None, "fewer are reserved than are available"
        number = next(i for i in count() if i not in self._landings)
        reservation = Reservation(number, next(self._generations), len(prefix), pages)
        self._landings[number] = _Landing(reservation, prefix)
        return reservation

    def finish(self, reservation: Reservation) -> list[int]:
        """All pages have arrived. Returns those of the whole prompt, now held by the caller, who publishes them."""
        landing = self._end(reservation)
        self._pool.arrived(reservation.pages)
        return landing.prefix + reservation.pages

    def cancel(self, reservation: Reservation, *, quarantine: bool) -> None:
        """Gives a live reservation up."""
        landing = self._end(reservation)
        self._pool.release(landing.prefix)
        if not quarantine:
            self._pool.free_reserved(reservation.pages)
            return
        self._pool.quarantine(reservation.pages)
        landing.quarantined = True
        self._landings[reservation.id] = landing

    def end_quarantine(self, reservation: Reservation) -> None:
        """No write into the pages of a cancelled reservation can come any more."""
        self._get(reservation, quarantined=True)
        del self._landings[reservation.id]
        self._pool.end_quarantine(reservation.pages)

    def held_pages(self) -> list[int]:
        """The cached pages that live reservations hold; a page as often as it is held."""
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

    def _get(self, reservation: Reservation, *, quarantined: bool) -> _Landing:
        landing = self._landings.get(reservation.id)
        if landing is None or landing.reservation != reservation or landing.quarantined != quarantined:
            raise ValueError(
                f"reservation {reservation.id} (generation {reservation.generation}) is not "
                f"{'in quarantine' if quarantined else 'live'}"
            )
        return landing

    def _end(self, reservation: Reservation) -> _Landing:
        landing = self._get(reservation, quarantined=False)
        del self._landings[reservation.id]
        return landing
