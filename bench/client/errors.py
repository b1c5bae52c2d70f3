"""How a request fails inside the client."""

from bench.errors import BenchError


class RequestError(BenchError):
    """A request did not end as it should. It ends up in its record, never in the run.

    Args:
        kind: A `bench.record.Failure` or `http_<status>`.
        detail: What the server or the socket said about it.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class StaleConnectionError(RequestError):
    """The connection was lost as soon as it was used. If it was a kept-alive one, another may do."""
