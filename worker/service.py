"""What a kind of worker adds to the shared parts."""

from collections.abc import Callable
from typing import Protocol

from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import StepOutput
from worker.engine_bridge import Update
from worker.fills import Wire
from worker.node import Node
from worker.sessions import RequestHandler


class Service(RequestHandler, Protocol):
    """Serves requests or fills. Everything but `hook` runs on the event loop."""

    @property
    def busy(self) -> bool:
        """Whether a request or fill is not finished yet."""

    def hook(self, engine: Engine, output: StepOutput | None) -> None:
        """Runs on the engine thread after every pass."""

    def update(self, update: Update) -> None:
        """Takes what a pass brought."""

    def add_load(self, load: pb.Load) -> None:
        """Adds what the engine does not know of to a load report."""

    async def fills(self, wire: Wire) -> None:
        """Serves one stream of another worker's fills."""

    async def stop(self) -> None:
        """Ends every request and fill in order; returns when nothing more will be sent. Given about a second."""


MakeService = Callable[[Node], Service]
