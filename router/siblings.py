"""The other routers of the cluster, asked for what only they know.

Each router has an admin port, where it answers for itself alone; its lease says where. The caller's credentials go
along: all routers of a cluster have the same keys.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from urllib.parse import quote

from cpd.membership import Member
from router.errors import describe

ANSWER_S = 1.0
"""A router has this long to answer another one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a router answered.

    Attributes:
        status: Of HTTP; 0 where there was no answer.
        body: Of the answer.
        error: Why there was no answer, for people.
        silent: There was none in time.
    """

    router_id: str
    status: int
    body: bytes = b""
    error: str = ""
    silent: bool = False

    @property
    def ok(self) -> bool:
        """Whether the body is what was asked for."""
        return self.status == 200


class Siblings:
    """All routers of the cluster but this one.

    Args:
        router_id: This router's name.
        listed: The live routers.
    """

    def __init__(self, router_id: str, listed: Callable[[], Sequence[Member]]) -> None:
        self.router_id = router_id
        self._listed = listed

    @property
    def members(self) -> list[Member]:
        """Their leases."""
        return [member for member in self._listed() if member.id != self.router_id]

    async def serve_at(self, own: Member) -> bool:
        """Whether one of them is ready that has the public port of this one, whose lease is `own`; or it is too busy to
        say so."""
        place = (own.host, own.address)
        sharing = [member for member in self.members if (member.host, member.address) == place]
        return any(answer.ok or answer.silent for answer in await _ask_all(sharing, "/readyz", b""))

    async def ask(self, path: str, authorization: bytes = b"") -> list[Answer]:
        """What each of them answers to a GET of `path`, within about ANSWER_S; they are asked at the same time."""
        return await _ask_all(self.members, quote(path), authorization)


async def _ask_all(members: Sequence[Member], path: str, authorization: bytes) -> list[Answer]:
    return list(await asyncio.gather(*(_ask(member, path, authorization) for member in members)))


async def _ask(member: Member, path: str, authorization: bytes) -> Answer:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.to_thread(_get, member, path, authorization)
    except TimeoutError:
        return Answer(member.id, 0, error=f"no answer within {ANSWER_S:g} s", silent=True)
    except (OSError, HTTPException, ValueError) as error:  # the last: its lease has no such address
        return Answer(member.id, 0, error=describe(error))


def _get(member: Member, path: str, authorization: bytes) -> Answer:
    host, _, port = member.admin.rpartition(":")
    connection = HTTPConnection(host.strip("[]"), int(port), timeout=ANSWER_S)
    try:
        connection.request("GET", path, headers={"authorization": authorization} if authorization else {})
        response = connection.getresponse()
        return Answer(member.id, response.status, response.read(), "" if response.status == 200 else response.reason)
    finally:
        connection.close()
