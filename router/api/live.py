"""The response to `GET /cluster/live`: snapshots, until the client hangs up or the router drains."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.connection import connection_of
from router.operations.feed import ClusterFeed

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class LiveResponse(Response):
    """Sends snapshots as server-sent events, as fast as they are made or the client reads."""

    def __init__(self, feed: ClusterFeed) -> None:
        self.background = None
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until there are no more."""
        with self._feed.listen() as listener, connection_of(scope).on_hang_up(listener.hang_up):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while (event := await listener.next()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
