"""The engine: requests in, tokens out, one step at a time. Runs on one thread and never reads a clock."""

from collections.abc import Sequence

from engine.batch import Runner
from engine.types import CacheEvent, EngineStats, Output, Request, Reservation, StepOutput


class Engine:
    """One model's scheduler, paged cache and step loop."""

    def __init__(
        self, runner: Runner, *, max_model_len: int, token_budget: int, max_num_seqs: int, max_queue_tokens: int
    ) -> None:
        raise NotImplementedError

    max_model_len: int

    def add(self, request: Request) -> None:
        """Puts a request in the waiting queue.

        Raises:
            QueueFullError: The queue holds its `max_queue_tokens`. An empty one takes any request.
            ValueError: The request can never be served here.
        """
        raise NotImplementedError

    def abort(self, request_id: str, choices: Sequence[int] | None = None) -> None:
        """Ends these choices of a request (None: all) in whatever state they are. Unknown ones are ignored."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether a step would do something.

        False also when everything waits for pages that others hold (reservations, pins): call again after the
        next call that changes the engine.
        """
        raise NotImplementedError

    def step(self) -> StepOutput:
        """Computes one batch. Pin the pages of `computed` before the next call."""
        raise NotImplementedError

    def uncached_tokens(self, request: Request) -> int:
        """Tokens that a prefill of this request would compute now."""
        raise NotImplementedError

    def reserve(self, request: Request) -> Reservation | None:
        """Holds the cached prefix and sets pages aside for the rest of the prompt; None: not now, try later."""
        raise NotImplementedError

    def activate(self, reservation: Reservation, request: Request, first: Sequence[Output]) -> list[Output]:
        """All pages of the reservation have arrived: goes on with each choice after its first tokens `first`.

        Choices that `first` finished or lacks are dropped. Returns the end of choices that can't go on here.
        """
        raise NotImplementedError

    def cancel(self, reservation: Reservation, *, quarantine: bool) -> None:
        """Gives a reservation up. With `quarantine` its pages stay out of use until `end_quarantine`."""
        raise NotImplementedError

    def end_quarantine(self, reservation: Reservation) -> None:
        """No write into the cancelled reservation's pages can come any more: frees them."""
        raise NotImplementedError

    def pin(self, pages: Sequence[int]) -> None:
        """Keeps pages in use while a transfer reads them."""
        raise NotImplementedError

    def unpin(self, pages: Sequence[int]) -> None:
        """Takes one pin of each page back."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def take_cache_events(self) -> list[CacheEvent]:
        """What became findable in the cache or left it since the last call, in order."""
        raise NotImplementedError

    def cached_hashes(self) -> list[bytes]:
        """All blocks that can be found in the cache now, the effect of events not yet taken included."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has exactly one owner and all records agree."""
        raise NotImplementedError
