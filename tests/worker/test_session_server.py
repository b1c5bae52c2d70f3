import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cpd.common.blocks import Tier
from cpd.common.stream import MAX_MESSAGE_BYTES, Stream, StreamServer, connect
from cpd.common.trust import ClusterSecret
from cpd.protocol.handshake import Caller, open_as
from cpd.protocol.version import own_version
from cpd.rpc import cpd_pb2 as pb
from engine.engine import Engine
from engine.types import Output
from tests.engine.fakes import make_engine, make_request, prompt
from tests.newer import unknown_kind, with_unknown_fields
from tests.waiting import eventually
from worker import router_session, session_server
from worker.async_engine import EngineThread
from worker.router_session import RouterSession
from worker.session_server import HELLO_BYTES, SNAPSHOT_HASHES, SessionServer

TOKEN = "secret"


class Recorder:
    """A handler that records calls and answers nothing."""

    def __init__(self) -> None:
        self.submitted: list[tuple[RouterSession, int]] = []
        self.aborted: list[int] = []
        self.ended: list[RouterSession] = []

    def submit(self, session: RouterSession, message: pb.Submit) -> None:
        if message.request == 666:
            raise RuntimeError("a bug")
        self.submitted.append((session, message.request))

    def park(self, session: RouterSession, message: pb.Park) -> None:
        raise AssertionError("no test parks a request")

    def abort(self, session: RouterSession, message: pb.Abort) -> None:
        self.aborted.append(message.request)

    def session_ended(self, session: RouterSession) -> None:
        self.ended.append(session)


async def _unwanted(stream: Stream[pb.RouterMessage]) -> None:
    raise AssertionError("no worker connects here")


class Server:
    """A server with sessions over a real engine."""

    def __init__(self, thread: EngineThread) -> None:
        self.engine = thread
        self.handler = Recorder()
        self.load = pb.Load(state=pb.STATE_READY, free_pages=64)
        self.sessions = SessionServer(
            worker_id="w",
            hello=lambda: pb.Hello(worker_id="w"),
            load=lambda: self.load,
            engine=thread,
            handler=self.handler,
            serve_worker=_unwanted,
            secret=ClusterSecret(TOKEN),
        )
        thread.attach(lambda engine, output: None, self.sessions.publish)
        self.server = StreamServer(pb.RouterMessage, HELLO_BYTES, self.sessions.serve)
        self.address = ""

    @property
    def latest(self) -> RouterSession:
        return self.handler.submitted[-1][0]


@asynccontextmanager
async def serving(engine: Engine | None = None) -> AsyncIterator[Server]:
    made = engine or make_engine()[0]
    thread = EngineThread(lambda: made, on_failure=_unexpected)
    await thread.start()
    server = Server(thread)
    server.address = f"127.0.0.1:{await server.server.start('127.0.0.1', 0)}"
    try:
        yield server
    finally:
        await server.server.close()
        await thread.close()


class Router:
    """The other end of a session."""

    def __init__(self, server: Server, router_id: str = "router", token: str = TOKEN) -> None:
        self._address = server.address
        self._caller = Caller("router", router_id)
        self._secret = ClusterSecret(token)
        self._unread: deque[pb.WorkerMessage] = deque()
        self.wire: Stream[pb.WorkerMessage]

    async def connect(self) -> None:
        self.wire = await connect(self._address, pb.WorkerMessage, MAX_MESSAGE_BYTES)

    async def __aenter__(self) -> "Router":
        await self.connect()
        await open_as(self._caller, self.wire, "w", self._secret)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wire.abort()

    def send(self, **kind: Any) -> None:
        self.wire.send(pb.RouterMessage(**kind))

    async def read(self) -> pb.WorkerMessage:
        if not self._unread:
            message = await asyncio.wait_for(self.wire.receive(), 20)
            assert message is not None
            self._unread.extend(message.batch.messages if message.WhichOneof("kind") == "batch" else [message])
        return self._unread.popleft()

    async def read_until(self, kind: str) -> pb.WorkerMessage:
        while (message := await self.read()).WhichOneof("kind") != kind:
            pass
        return message

    async def opened(self) -> list[pb.WorkerMessage]:
        """Reads all messages up to the first load report."""
        messages = [await self.read()]
        while messages[-1].WhichOneof("kind") != "load":
            messages.append(await self.read())
        return messages

    async def ended(self) -> str:
        """Returns why the session ended; empty if the worker gave no reason."""
        reason = ""
        async with asyncio.timeout(20):
            while (message := await self.wire.receive()) is not None:
                reason = message.end.reason
        return reason


async def test_a_session_opens_with_hello_snapshot_and_load() -> None:
    async with serving() as server, Router(server) as router:
        kinds = [message.WhichOneof("kind") for message in await router.opened()]
        assert kinds == ["hello", "snapshot", "load"]


async def test_the_snapshot_comes_in_parts_and_events_follow_without_a_gap() -> None:
    engine, _ = make_engine(num_pages=64)
    async with serving(engine) as server:
        await _serve(server, "a", 0)
        async with Router(server) as router:
            opened = await router.opened()
            snapshots = [message.snapshot for message in opened if message.WhichOneof("kind") == "snapshot"]
            assert [snapshot.last for snapshot in snapshots] == [True]
            hashes = snapshots[0].hashes
            assert {hashes[i : i + 8] for i in range(0, len(hashes), 8)} == {
                block_hash[:8]
                for block_hash in await server.engine.call(lambda engine: engine.cached_hashes(Tier.PAGES))
            }
            await _serve(server, "b", 5)
            events = (await router.read_until("cache")).cache
            assert events.number == snapshots[0].number + 1


async def test_long_snapshots_stay_below_the_message_bound() -> None:
    async with serving() as server:
        server.engine.snapshot = _long_snapshot  # type: ignore[method-assign]
        async with Router(server) as router:
            snapshots = [m for m in await router.opened() if m.WhichOneof("kind") == "snapshot"]
            assert [message.snapshot.last for message in snapshots] == [False, False, True]
            assert all(message.ByteSize() < 256 << 10 for message in snapshots)
            assert sum(len(message.snapshot.hashes) for message in snapshots) == 8 * (2 * SNAPSHOT_HASHES + 1)


async def test_messages_reach_the_handler_and_results_the_router() -> None:
    async with serving() as server, Router(server) as router:
        router.send(submit=pb.Submit(request=1))
        router.send(abort=pb.Abort(request=2))
        await eventually(lambda: server.handler.aborted == [2])
        server.latest.send_output(1, 0, Output("", 0, [5], []))
        server.latest.refuse(pb.Refusal(request=2))
        server.latest.send_output(3, 0, Output("", 0, [6], []))
        assert [output.request for output in (await router.read_until("step")).step.outputs] == [1]
        assert (await router.read_until("refusal")).refusal.request == 2
        assert [output.request for output in (await router.read_until("step")).step.outputs] == [3]


async def test_outputs_sent_at_the_same_time_share_a_message() -> None:
    async with serving() as server, Router(server) as router:
        await router.opened()
        router.send(submit=pb.Submit(request=1))
        await eventually(lambda: bool(server.handler.submitted))
        for i in range(50):
            server.latest.send_output(i, 0, Output("", 0, [], []))
        assert len((await router.read_until("step")).step.outputs) == 50


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_the_end_of_a_stream_ends_its_requests(how: str) -> None:
    async with serving() as server:
        async with Router(server) as router:
            await router.opened()
            router.send(submit=pb.Submit(request=1))
            await eventually(lambda: bool(server.handler.submitted))
            getattr(router.wire, how)()
        await eventually(lambda: server.handler.ended == [server.latest])


async def test_a_new_session_of_the_same_router_supersedes_the_old_one() -> None:
    async with serving() as server, Router(server) as old:
        await old.opened()
        old.send(submit=pb.Submit(request=1))
        await eventually(lambda: bool(server.handler.submitted))
        session = server.latest
        async with Router(server) as new, Router(server, "other") as other:
            await new.opened()
            await other.opened()
            assert server.handler.ended == [session]
            assert "superseded" in await old.ended()
            session.send_output(1, 0, Output("", 0, [], []))  # dropped
            server.sessions.publish_load(pb.Load(running=3))
            assert (await new.read_until("load")).load.running == 3
            assert (await other.read_until("load")).load.running == 3
        await eventually(lambda: len(server.handler.ended) == 3)


async def test_a_router_that_does_not_read_is_cut_off_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "END_TIMEOUT_S", 20.0)
    monkeypatch.setattr(router_session, "MAX_PENDING_OUTPUTS", 20_000)
    async with serving() as server, Router(server, "good") as good, Router(server, "slow") as slow:
        for router in (good, slow):
            await router.opened()
            router.send(submit=pb.Submit(request=1))
        await eventually(lambda: len(server.handler.submitted) == 2)
        opened = {session.router_id: session for session, _ in server.handler.submitted}
        while not opened["slow"].ended.done():
            for i in range(1000):
                opened["slow"].send_output(i, 0, Output("", 0, list(range(100)), []))
            opened["good"].send_output(1, 0, Output("", 0, [], []))
            await good.read_until("step")
        await eventually(lambda: server.handler.ended == [opened["slow"]])
        opened["good"].send_output(2, 0, Output("", 0, [], []))
        assert [output.request for output in (await good.read_until("step")).step.outputs] == [2]
        assert "too far behind" in await slow.ended()


async def test_an_error_in_the_handler_ends_only_its_session() -> None:
    async with serving() as server, Router(server) as router, Router(server, "other") as other:
        await other.opened()
        router.send(submit=pb.Submit(request=666))
        assert "could not go on" in await router.ended()
        await eventually(lambda: len(server.handler.ended) == 1)
        server.sessions.publish_load(pb.Load(running=1))
        assert (await other.read_until("load")).load.running == 1


@pytest.mark.parametrize("first", [{"submit": pb.Submit()}, {"hello": pb.RouterHello()}])
async def test_a_session_must_start_with_a_named_hello(first: dict[str, Any]) -> None:
    async with serving() as server:
        router = Router(server)
        await router.connect()
        router.send(**first)
        assert "starts with a RouterHello" in await router.ended()


async def test_a_second_hello_ends_the_session() -> None:
    async with serving() as server, Router(server) as router:
        router.send(hello=pb.RouterHello(router_id="router"))
        assert "unexpected message 'hello'" in await router.ended()


@pytest.mark.parametrize("token", ["", "wrong", "secret2"])
async def test_a_router_with_another_secret_is_refused(token: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        for _ in range(2):
            router = Router(server, token=token)
            await router.connect()
            router.send(hello=pb.RouterHello(router_id="router", version=own_version(), nonce=bytes(16)))
            assert (await router.read()).WhichOneof("kind") == "challenge"
            router.send(proof=pb.Proof(proof=ClusterSecret(token).sign("handshake of a caller")))
            assert "router router does not prove the cluster's secret" in await router.ended()
        assert server.handler.ended == []
        assert caplog.text.count("router router does not prove the cluster's secret") == 1


async def test_an_unauthenticated_peer_cannot_send_a_long_message() -> None:
    async with serving() as server:
        router = Router(server)
        await router.connect()
        router.send(hello=pb.RouterHello(router_id="x" * HELLO_BYTES))
        assert await router.ended() == ""
        assert server.handler.ended == []


async def test_messages_of_unknown_kinds_and_unknown_fields_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving() as server, Router(server) as router:
        await router.opened()
        for _ in range(3):
            router.wire.send(unknown_kind(pb.RouterMessage))
        router.wire.send(with_unknown_fields(pb.RouterMessage(submit=pb.Submit(request=5))))
        await eventually(lambda: bool(server.handler.submitted))
        assert [request for _, request in server.handler.submitted] == [5]
        assert caplog.text.count("messages that this version does not know") == 1


async def test_flush_waits_for_queued_messages() -> None:
    async with serving() as server, Router(server) as router:
        await router.opened()
        router.send(submit=pb.Submit(request=1))
        await eventually(lambda: bool(server.handler.submitted))
        server.latest.refuse(pb.Refusal(request=1))
        await asyncio.wait_for(server.sessions.flush(), 20)
        server.sessions.end_all("the worker stops", failed=False)
        assert (await router.read_until("refusal")).refusal.request == 1
        assert await router.ended() == "the worker stops"


async def test_a_dead_engine_ends_new_sessions() -> None:
    async with serving() as server:
        await server.engine.close()
        async with Router(server) as router:
            assert "engine has stopped" in await router.ended()


async def _serve(server: Server, name: str, start: int) -> None:
    def idle(engine: Engine) -> bool | None:
        return None if engine.has_work else True

    await server.engine.call(lambda engine: engine.add(make_request(name, prompt(50, start), max_tokens=4)))
    await server.engine.poll(idle)


async def _long_snapshot() -> Any:
    from worker.async_engine import CacheSnapshot

    return CacheSnapshot(0, {Tier.PAGES: [i.to_bytes(16, "big") for i in range(2 * SNAPSHOT_HASHES + 1)]})


def _unexpected(error: BaseException) -> None:
    raise AssertionError(error)
