"""Handshakes over real connections: honest peers, impostors, other versions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cpd.common.stream import Stream, StreamError, StreamServer, connect
from cpd.common.tls import make_certificate
from cpd.common.trust import ClusterSecret
from cpd.protocol import handshake
from cpd.protocol.handshake import Caller, HandshakeError, answer_as, open_as
from cpd.protocol.version import MAJOR, MINOR
from cpd.rpc import cpd_pb2 as pb
from tests.newer import with_unknown_fields

SECRET = ClusterSecret("secret")
ROUTER = Caller("router", "r")
MOST = 4096
OWN = f"{MAJOR}.{MINOR}"

Incoming = Stream[pb.RouterMessage]
Outgoing = Stream[pb.WorkerMessage]


class Worker:
    """The end that answers. `results` has a caller or an error for each stream."""

    def __init__(self, worker_id: str = "w", secret: ClusterSecret = SECRET) -> None:
        self.id, self.secret = worker_id, secret
        self.results: asyncio.Queue[Caller | HandshakeError | StreamError] = asyncio.Queue()
        self.received: list[bytes] = []

    async def serve(self, stream: Incoming) -> None:
        receive = stream.receive

        async def recorded() -> pb.RouterMessage | None:
            message = await receive()
            self.received.append(message.SerializeToString() if message is not None else b"")
            return message

        stream.receive = recorded  # type: ignore[method-assign]
        try:
            self.results.put_nowait(await answer_as(self.id, stream, self.secret))
        except (HandshakeError, StreamError) as error:
            self.results.put_nowait(error)
            stream.send(pb.WorkerMessage(end=pb.End(reason=str(error))))

    async def result(self) -> Caller | HandshakeError | StreamError:
        return await asyncio.wait_for(self.results.get(), 20)


@asynccontextmanager
async def opened(serve: Callable[[Incoming], Awaitable[None]]) -> AsyncIterator[Outgoing]:
    """A stream to a server."""
    server = StreamServer(pb.RouterMessage, MOST, serve)
    stream = await connect(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", pb.WorkerMessage, MOST)
    try:
        yield stream
    finally:
        stream.abort()
        await server.close()


async def received(stream: Outgoing) -> pb.WorkerMessage:
    message = await asyncio.wait_for(stream.receive(), 20)
    assert message is not None
    return message


@pytest.mark.parametrize("caller", [ROUTER, Caller("worker", "d")])
@pytest.mark.parametrize("secret", [SECRET, ClusterSecret("")])
async def test_both_ends_accept_each_other(caller: Caller, secret: ClusterSecret) -> None:
    worker = Worker(secret=secret)
    async with opened(worker.serve) as stream:
        await open_as(caller, stream, "w", secret)
        assert await worker.result() == caller
        assert not any(b"secret" in message for message in worker.received)


@pytest.mark.parametrize(
    ("here", "there", "reason"),
    [
        ("secret", "guess", "it has another one"),
        ("secret", "", "it was started without one"),
    ],
)
async def test_a_fake_worker_is_refused_and_gets_no_proof(here: str, there: str, reason: str) -> None:
    worker = Worker(secret=ClusterSecret(there))
    async with opened(worker.serve) as stream:
        with pytest.raises(HandshakeError, match=f"worker w does not prove the cluster's secret: {reason}"):
            await open_as(ROUTER, stream, "w", ClusterSecret(here))
    assert "did not answer the challenge" in str(await worker.result())
    assert len([message for message in worker.received if message]) == 1


@pytest.mark.parametrize(
    ("proof", "reason"), [(b"", "it was started without one"), (bytes(32), "it has another one, or repeats")]
)
async def test_a_fake_router_is_refused(proof: bytes, reason: str) -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        stream.send(pb.RouterMessage(hello=_hello()))
        assert (await received(stream)).WhichOneof("kind") == "challenge"
        stream.send(pb.RouterMessage(proof=pb.Proof(proof=proof)))
        assert reason in (await received(stream)).end.reason
        assert "router r does not prove the cluster's secret" in str(await worker.result())


async def test_a_recorded_handshake_cannot_be_replayed() -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        await open_as(ROUTER, stream, "w", SECRET)
        assert await worker.result() == ROUTER
    recorded = [pb.RouterMessage.FromString(message) for message in worker.received]
    assert [message.WhichOneof("kind") for message in recorded] == ["hello", "proof"]
    async with opened(worker.serve) as stream:
        for message in recorded:
            stream.send(message)
        assert (await received(stream)).WhichOneof("kind") == "challenge"
        assert "repeats what somebody else has said" in (await received(stream)).end.reason


async def test_a_recorded_challenge_cannot_be_replayed() -> None:
    worker = Worker()
    challenges: list[pb.WorkerMessage] = []
    async with opened(worker.serve) as stream:
        stream.send(pb.RouterMessage(hello=_hello()))
        challenges.append(await received(stream))

    async def replay(stream: Incoming) -> None:
        await stream.receive()
        stream.send(challenges[0])
        await stream.receive()

    async with opened(replay) as stream:
        with pytest.raises(HandshakeError, match="repeats what somebody else has said"):
            await open_as(ROUTER, stream, "w", SECRET)


async def test_a_callers_own_nonce_and_code_cannot_be_reflected() -> None:
    """A fake worker asks the victim, which is a worker too, to make the code that the fake needs."""
    victim = Worker("victim")

    async def reflect(stream: Incoming) -> None:
        hello = await stream.receive()
        assert hello is not None
        async with opened(victim.serve) as to_victim:
            to_victim.send(hello)
            answer = await received(to_victim)
        answer.challenge.worker_id = "w"
        stream.send(answer)
        await stream.receive()

    async with opened(reflect) as stream:
        with pytest.raises(HandshakeError, match="worker w does not prove the cluster's secret"):
            await open_as(Caller("worker", "victim"), stream, "w", SECRET)


async def test_a_relay_between_two_tls_connections_is_refused() -> None:
    """The relay has an own certificate, which the caller was made to accept, and passes all messages on."""
    worker, certificate, own = Worker(), make_certificate(), make_certificate()
    server = StreamServer(pb.RouterMessage, MOST, worker.serve)
    address = certificate.named_in(f"127.0.0.1:{await server.start('127.0.0.1', 0, certificate)}")

    async def relay(stream: Incoming) -> None:
        there = await connect(address, pb.WorkerMessage, MOST)
        while (message := await stream.receive()) is not None:
            there.send(message)
            if (answer := await there.receive()) is not None:
                stream.send(answer)
        there.abort()

    relays = StreamServer(pb.RouterMessage, MOST, relay)
    false_address = own.named_in(f"127.0.0.1:{await relays.start('127.0.0.1', 0, own)}")
    async with asyncio.timeout(20):
        stream = await connect(address, pb.WorkerMessage, MOST)
        await open_as(ROUTER, stream, "w", SECRET)
        assert await worker.result() == ROUTER
        stream.abort()
        relayed = await connect(false_address, pb.WorkerMessage, MOST)
        with pytest.raises(HandshakeError, match="worker w does not prove the cluster's secret"):
            await open_as(ROUTER, relayed, "w", SECRET)
        relayed.abort()
        assert "did not answer the challenge" in str(await worker.result())
    await relays.close()
    await server.close()


async def test_a_worker_can_not_pass_for_another_one() -> None:
    other = Worker("other")
    async with opened(other.serve) as stream:
        with pytest.raises(HandshakeError, match="the worker there is 'other', not 'w'"):
            await open_as(ROUTER, stream, "w", SECRET)


async def test_a_code_of_a_worker_is_none_of_a_caller() -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        stream.send(pb.RouterMessage(hello=_hello()))
        challenge = (await received(stream)).challenge
        stream.send(pb.RouterMessage(proof=pb.Proof(proof=challenge.proof)))
        assert "does not prove the cluster's secret" in (await received(stream)).end.reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.RouterMessage(submit=pb.Submit()), "starts with a RouterHello"),
        (pb.RouterMessage(hello=pb.RouterHello()), "starts with a RouterHello"),
        (pb.RouterMessage(hello=pb.RouterHello(router_id="a\nb")), "starts with a RouterHello"),
        (pb.RouterMessage(hello=pb.RouterHello(router_id="r", version=pb.Version(major=1))), "nonce of router r"),
    ],
)
async def test_a_stream_that_starts_otherwise_is_refused(message: pb.RouterMessage, reason: str) -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        stream.send(message)
        assert reason in (await received(stream)).end.reason


async def test_another_message_in_place_of_the_proof_is_refused() -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        stream.send(pb.RouterMessage(hello=_hello()))
        await received(stream)
        stream.send(pb.RouterMessage(submit=pb.Submit()))
        assert "did not answer the challenge" in (await received(stream)).end.reason


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (0, f"worker w speaks version {OWN} of the cluster's protocol, router r version 0.3: router r is older"),
        (2, f"worker w speaks version {OWN} of the cluster's protocol, router r version 2.3: worker w is older"),
    ],
)
async def test_a_router_of_another_major_version_is_refused(theirs: int, sentence: str) -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        stream.send(pb.RouterMessage(hello=_hello(version=pb.Version(major=theirs, minor=3))))
        assert sentence in (await received(stream)).end.reason
        assert sentence in str(await worker.result())


@pytest.mark.parametrize(
    ("answer", "older"),
    [
        (pb.WorkerMessage(challenge=pb.Challenge(worker_id="w", version=pb.Version(major=2))), "router r"),
        (pb.WorkerMessage(challenge=pb.Challenge(worker_id="w")), "worker w"),
        (pb.WorkerMessage(hello=pb.Hello(worker_id="w")), "worker w"),  # before there were versions
    ],
)
async def test_a_worker_of_another_major_version_is_refused(answer: pb.WorkerMessage, older: str) -> None:
    async def serve(stream: Incoming) -> None:
        await stream.receive()
        stream.send(answer)
        await stream.receive()

    async with opened(serve) as stream:
        with pytest.raises(HandshakeError, match=f"{older} is older; upgrade it"):
            await open_as(ROUTER, stream, "w", SECRET)


async def test_a_newer_minor_version_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    async with opened(worker.serve) as stream:
        send = stream.send
        stream.send = lambda message: send(with_unknown_fields(message))  # type: ignore[method-assign]
        monkeypatch.setattr(handshake, "own_version", lambda: pb.Version(major=1, minor=7))
        monkeypatch.setattr(handshake, "CAPABILITIES", ("new",))
        await open_as(ROUTER, stream, "w", SECRET)
        assert await worker.result() == ROUTER


def _hello(**fields: pb.Version) -> pb.RouterHello:
    usual = {"version": pb.Version(major=1)}
    return pb.RouterHello(router_id="r", nonce=bytes(range(16)), **(usual | fields))  # type: ignore[arg-type]
