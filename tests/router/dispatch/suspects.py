"""A worker that counts the suspects that it runs at a time."""

import asyncio
from collections.abc import AsyncIterator

from cpd.rpc import cpd_pb2 as pb
from router.dispatch.attempts import PROBATION_TOKENS
from tests.router.conftest import Says


class Suspects:
    """A worker's script.

    Attributes:
        most: Most requests that were on probation at a time.
    """

    def __init__(self, says: Says, reply: str) -> None:
        self.most = 0
        self._says = says
        self._reply = reply
        self._on_probation = 0

    async def script(self, submit: pb.Submit) -> AsyncIterator[pb.Output | pb.Refusal]:
        self._on_probation += 1
        self.most = max(self.most, self._on_probation)
        count = 0
        async for output in self._says(self._reply)(submit):
            await asyncio.sleep(0)
            count += 1
            self._on_probation -= count == PROBATION_TOKENS
            yield output
