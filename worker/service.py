"""The interface of a role: what `decode_worker` and `prefill_worker` add to a worker."""

from collections.abc import Callable
from typing import Protocol

from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import StepOutput
from worker.async_engine import Update
from worker.context import WorkerContext
from worker.prefill_server import IncomingStream
from worker.session_server import RequestHandler


class Service(RequestHandler, Protocol):
    """Serves requests or prefill requests. Everything but `after_pass` runs on the event loop."""

    @property
    def busy(self) -> bool:
        """True while a request or prefill request has not ended."""

    def after_pass(self, engine: Engine, output: StepOutput | None) -> None:
        """Runs on the engine thread after every pass."""

    def update(self, update: Update) -> None:
        """Handles the results of a pass."""

    def add_load(self, load: pb.Load) -> None:
        """Adds what the engine does not know to a load report."""

    async def serve_worker(self, stream: IncomingStream) -> None:
        """Serves another worker's stream of prefill requests."""

    def hand_over(self) -> None:
        """Gives what still runs to other workers, because the time of a drain is over. Called again and again."""

    async def stop(self) -> None:
        """Ends every request in order; returns when nothing more will be sent. It has about a second."""


MakeService = Callable[[WorkerContext], Service]
