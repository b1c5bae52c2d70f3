"""Errors of a request inside the client."""

from bench.errors import BenchError


class RequestError(BenchError):
    """A request failed. The error is recorded and does not end the run.

    Args:
        kind: A `bench.record.Failure` or `http_<status>`.
        detail: Message of the server or the socket.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class StaleConnectionError(RequestError):
    """The connection was lost as soon as it was used. If it was an idle one, the request can use another."""
