"""The receiver's end of a connection.

greeting ── Hello ──▶ open ──────▶ failed
    └── wrong Hello ─▶ rejected ─────┘      stays open for a while so that the sender can read why
"""

from typing import Any

from cpd.common.errors import TransferError
from kvtransfer.landings import LandingTable
from kvtransfer.session import frames
from kvtransfer.session.receiving import Receiving
from kvtransfer.ucx.connection import MAX_RUNS, Connection
from kvtransfer.ucx.reactor import Reactor

_STREAM_BYTES = 4 << 20  # take much longer than a nap of the reactor


class Incoming(Connection):
    """Lets the transport at the other end write pages into one pool.

    Args:
        landings: The pool's landings.
        page_bytes: Page size of the pool.
        key: Key of this transport's address.
    """

    def __init__(self, reactor: Reactor, endpoint: Any, landings: LandingTable, page_bytes: int, key: bytes) -> None:
        super().__init__(reactor, endpoint)
        self._landings = landings
        self._receiving = Receiving(landings, self, key, page_bytes)
        self._open = False

    def _handle(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Hello() if not self._open:
                rejection = self._receiving.rejection(frame)
                self._open = rejection is None
                assert self._reactor.memory is not None
                self._send(rejection or self._receiving.welcome(frame, self._reactor.memory.key))
            case frames.Proof() if self._open:
                self._receiving.check(frame)
            case frames.Offer() if self._open and len(frame.runs) <= MAX_RUNS:
                self._send(self._receiving.admit(frame))
            case frames.Sent() if self._open:
                self._receiving.arrived(frame.batch)
                self._send(frames.Done(frame.batch))
            case _:
                raise TransferError(f"the sender sent {type(frame).__name__} out of turn")

    def streams(self) -> bool:
        return self._receiving.num_bytes >= _STREAM_BYTES

    def _advance(self) -> bool:
        return False

    def _page_requests(self) -> list[Any]:
        return []

    def _patience(self) -> float | None:
        return self._receiving.patience(is_open=self._open)

    def _lost(self, reason: str) -> None:
        self._receiving.stopped()
        self._landings.fail(self, reason, gone=True)
