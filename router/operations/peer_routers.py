"""Asks the other routers of the cluster for their answers to a question.

Each router has an admin port, where it answers for itself alone; its lease has the address, and beyond one machine the
fingerprint of its certificate. The caller's credentials are passed on, to the server with that certificate only: all
routers of a cluster have the same keys.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx2

from cpd.common.membership import Member
from cpd.common.tls import base_url
from router.errors import describe

ANSWER_S = 1.0
"""Time limit for the answer of another router, in seconds."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The answer of one router.

    Attributes:
        status: HTTP status; 0 without an answer.
        body: The response's body.
        error: Reason why there is no usable answer, for humans; empty if there is one.
        timed_out: The router did not answer within ANSWER_S.
    """

    router_id: str
    status: int
    body: bytes = b""
    error: str = ""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """True if the body is the answer."""
        return self.status == 200


class PeerRouters:
    """All other routers of the cluster.

    Args:
        router_id: This router's name.
        list_routers: Returns the leases of all live routers.
    """

    def __init__(self, router_id: str, list_routers: Callable[[], Sequence[Member]]) -> None:
        self._router_id = router_id
        self._list_routers = list_routers

    async def serve_at(self, own: Member) -> bool:
        """Returns whether a peer serves the public port of this router, whose lease is `own`.

        A peer that is too busy to answer counts as serving.
        """
        place = (own.host, own.address)
        sharing = [member for member in self._members() if (member.host, member.address) == place]
        return any(answer.ok or answer.timed_out for answer in await self._ask_all(sharing, "/readyz", b""))

    async def ask(self, path: str, authorization: bytes = b"") -> list[PeerAnswer]:
        """Sends `GET path` to all peers at once and returns their answers, within about ANSWER_S."""
        return await self._ask_all(self._members(), path, authorization)

    async def drain(self, router_id: str, authorization: bytes) -> PeerAnswer:
        """Tells a peer to drain."""
        for member in self._members():
            if member.id == router_id:
                return await self._ask(member, "/drain", authorization, "POST")
        return PeerAnswer(router_id, 0, error="its lease is gone")

    def _members(self) -> list[Member]:
        return [member for member in self._list_routers() if member.id != self._router_id]

    async def _ask_all(self, members: Sequence[Member], path: str, authorization: bytes) -> list[PeerAnswer]:
        return list(await asyncio.gather(*(self._ask(member, path, authorization) for member in members)))

    async def _ask(self, member: Member, path: str, authorization: bytes, method: str = "GET") -> PeerAnswer:
        headers = {b"authorization": authorization} if authorization else {}
        try:
            url, verify = base_url(member.admin)
            # Connections are not kept: questions are rare, and a peer that stops would wait for the connection.
            async with (
                asyncio.timeout(ANSWER_S),
                # A TLS handshake that is cancelled leaves its socket open: it must end by itself.
                httpx2.AsyncClient(
                    verify=verify, trust_env=False, timeout=httpx2.Timeout(None, connect=ANSWER_S / 2)
                ) as client,
            ):
                response = await client.request(method, url + path, headers=headers)
        except (TimeoutError, httpx2.TimeoutException):
            return PeerAnswer(member.id, 0, error=f"no answer within {ANSWER_S:g} s", timed_out=True)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            return PeerAnswer(member.id, 0, error=describe(_root_cause(error)))
        error_text = "" if response.status_code == 200 else response.reason_phrase
        return PeerAnswer(member.id, response.status_code, response.content, error_text)


def _root_cause(error: BaseException) -> BaseException:
    """Returns the system's error, if any: the client's own only says that connecting failed."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
