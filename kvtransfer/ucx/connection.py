"""What both ends of a UCX connection do on the reactor's thread: exchange frames, notice failures, fail.

A connection fails when UCX reports an error, when the peer breaks the protocol, or when the peer owes something and
nothing has moved for a while. Failing destroys the endpoint first; only then are the pages declared safe.
"""

import abc
import time
from collections import deque
from typing import Any

from cpd.common.errors import TransferError
from kvtransfer.session import frames
from kvtransfer.ucx.reactor import Reactor

MAX_RUNS = 96  # in one offer
FRAME_BYTES = 1024  # of every frame on the wire: a receive must be posted before the length is known
_TICK_S = 0.25


class Connection(abc.ABC):
    """One end of a connection (implements `kvtransfer.ucx.reactor.Channel`).

    Raises:
        UCXError: The endpoint has already failed.
    """

    def __init__(self, reactor: Reactor, endpoint: Any) -> None:
        self.failed = False
        self._reactor = reactor
        self._endpoint = endpoint
        self._outbox: deque[tuple[Any, bytearray]] = deque()  # requests and frames that UCX may still read
        self._moved_at = time.monotonic()
        self._looked_at = self._moved_at
        self._incomplete = 0
        self._inbox = bytearray(FRAME_BYTES)
        endpoint.raise_on_error()
        self._frame_request = self._receive_frame()
        reactor.channels.add(self)

    def poll(self, now: float) -> bool:
        try:
            worked = self._step()
        except (TransferError, self._reactor.ucx.UCXError) as error:
            self.fail(self._reason() or str(error))
            return True
        if worked or self._moves(now):
            self._moved_at = now
        elif (patience := self._patience()) is not None and now - self._moved_at > patience:
            self.fail(f"the peer did nothing for {patience:g} s")
            return True
        return worked

    def wake_at(self) -> float | None:
        return None if self._patience() is None else time.monotonic() + _TICK_S

    def streams(self) -> bool:
        return False

    def fail(self, reason: str) -> None:
        if self.failed:
            return
        self.failed = True
        self._reactor.channels.discard(self)
        requests = [self._frame_request, *(request for request, _ in self._outbox), *self._page_requests()]
        if self._endpoint.alive:
            self._endpoint.set_close_callback(self._detach, (requests,))
            self._endpoint.close_blocking()
        self._reactor.drain(requests)
        self._endpoint = self._frame_request = None
        self._outbox.clear()
        self._lost(reason)

    @abc.abstractmethod
    def _handle(self, frame: frames.Frame) -> None:
        """Handles a frame. Raises TransferError if the peer may not send it now."""

    @abc.abstractmethod
    def _advance(self) -> bool:
        """Makes progress with pages in flight. Returns True if anything was done."""

    @abc.abstractmethod
    def _page_requests(self) -> list[Any]:
        """The UCX requests that read or write pages."""

    @abc.abstractmethod
    def _patience(self) -> float | None:
        """How many seconds the peer may be inactive. None if nothing is expected of it."""

    @abc.abstractmethod
    def _lost(self, reason: str) -> None:
        """Called when the endpoint is gone and UCX touches no page for it any more."""

    def _send(self, frame: frames.Frame) -> None:
        data = bytearray(frames.encode(frame).ljust(FRAME_BYTES, b"\0"))
        self._outbox.append((self._endpoint.stream_send(self._reactor.array(data)), data))

    def _receive_frame(self) -> Any:
        """Posts the receive of the next frame. On a failed endpoint it would never complete."""
        return self._endpoint.stream_recv(self._reactor.array(self._inbox))

    def _reason(self) -> str:
        """UCX's error of the endpoint; empty if there is none."""
        try:
            self._endpoint.raise_on_error()
        except self._reactor.ucx.UCXError as error:
            return str(error).rpartition("error: ")[2]
        return ""

    def _detach(self, requests: list[Any]) -> None:
        """Called while ucxx closes the endpoint.

        ucxx attaches requests that it can't cancel at once to their endpoint for ever, and with it worker and sockets.
        A request posted now makes it hand all of them to the worker, which releases them as they complete.
        """
        requests.append(self._endpoint.tag_recv(self._reactor.array(self._inbox), self._reactor.ucx.UCXXTag(0)))

    def _step(self) -> bool:
        worked = False
        while self._frame_request.completed:
            self._frame_request.check_error()
            self._handle(frames.decode(_unpadded(self._inbox)))
            self._endpoint.raise_on_error()
            self._frame_request = self._receive_frame()
            worked = True
        while self._outbox and self._outbox[0][0].completed:
            self._outbox.popleft()[0].check_error()
        self._endpoint.raise_on_error()
        return self._advance() or worked

    def _moves(self, now: float) -> bool:
        """True if pages completed out of order, behind the one that `_advance` waits for. Looks once a tick."""
        if now - self._looked_at < _TICK_S:
            return False
        self._looked_at = now
        before, self._incomplete = self._incomplete, sum(not request.completed for request in self._page_requests())
        return self._incomplete != before


def _unpadded(data: bytearray) -> bytes:
    return bytes(data[frames.PREFIX_BYTES :][: frames.length(data[: frames.PREFIX_BYTES])])
