"""Landings for prompts, or their first blocks, that come from another worker: the engine's side.

    reserve ──▶ live ──finish──▶ (its pages belong to a sequence)
                 └────cancel──▶ (pages free), or quarantined ──end_quarantine──▶ (pages free)

A live reservation holds the cached first blocks of the prompt, owns a page for each further block, keeps a row of
the running batch free, and is the filler of its blocks for whoever else needs them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from cpd.blocks import blocks_for
from engine.live import LiveSequences
from engine.types import Request, Reservation


@dataclass(eq=False, slots=True)
class _Landing:
    reservation: Reservation
    prefix: list[int]
    quarantined: bool = False


class Reservations:
    """Which pages are set aside, for what."""

    def __init__(self, live: LiveSequences) -> None:
        self._live = live
        self._pool = live.pool
        self._landings: dict[int, _Landing] = {}
        self._generations = count(1)

    @property
    def any_live(self) -> bool:
        """Whether somebody may still bring pages."""
        return any(not landing.quarantined for landing in self._landings.values())

    def reserve(self, request: Request, blocks: int | None = None) -> Reservation | None:
        """Sets pages aside, beside the headroom for what runs, and what those need who come back to run: they may wait
        for no more than the prefill lane. None if there are too few, or it is others' turn.

        Args:
            blocks: For the first so many full blocks only; None: for the whole prompt. None is returned, too, where
                they are all in the cache.
        """
        live = self._live
        returning = live.line.returning
        if live.table.free_rows - live.reserved_rows <= len(returning) or not live.line.may_be_overtaken:
            return None
        hashes = request.block_hashes[:blocks]
        prefix = self._pool.find(hashes)
        need = (blocks_for(len(request.token_ids)) if blocks is None else blocks) - len(prefix)
        if blocks is not None and not need:
            return None
        others = live.headroom + sum(blocks_for(seq.num_tokens) + 1 for seq in returning)
        self._pool.hold(prefix)
        pages = self._pool.reserve(need) if self._pool.available >= need + others else None
        if pages is None:
            self._pool.release(prefix)
            return None
        number = next(i for i in count() if i not in self._landings)
        landing = _Landing(Reservation(number, next(self._generations), len(prefix), pages), prefix)
        self._landings[number] = landing
        live.pending.claim(landing, hashes[len(prefix) :])
        live.reserved_rows += 1
        live.line.overtake()
        return landing.reservation

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
        counts, sizes = self._pool.counts(), self._sizes(lambda landing: not landing.quarantined)
        if counts.reserved != sum(sizes) or self._live.reserved_rows != len(sizes):
            raise AssertionError("pages or rows are reserved for no landing")
        if counts.quarantined != sum(self._sizes(lambda landing: landing.quarantined)):
            raise AssertionError("pages are quarantined for no landing")

    def _sizes(self, kind: Callable[[_Landing], bool]) -> list[int]:
        landings: Iterable[_Landing] = filter(kind, self._landings.values())
        return [len(landing.reservation.pages) for landing in landings]

    def _get(self, reservation: Reservation, *, quarantined: bool) -> _Landing:
        landing = self._landings.get(reservation.id)
        if landing is None or landing.reservation != reservation or landing.quarantined != quarantined:
            raise ValueError(
                f"reservation {reservation.id} (generation {reservation.generation}) is not "
                f"{'in quarantine' if quarantined else 'live'}"
            )
        return landing

    def _end(self, reservation: Reservation) -> _Landing:
        """Takes a live reservation out. Those who wait for its blocks find what is published by their next turn."""
        landing = self._get(reservation, quarantined=False)
        del self._landings[reservation.id]
        self._live.reserved_rows -= 1
        self._live.wake(self._live.pending.give_up(landing))
        return landing
