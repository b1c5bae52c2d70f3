"""The opening of every stream between processes: both ends prove the cluster's secret to each other.

    caller -> RouterHello: version, its name, a nonce
    worker -> Challenge:   version, its name, a nonce, HMAC("worker", both names, both nonces, certificate, …)
    caller -> Proof:       HMAC("caller", the same)

The secret is never sent. Each end's nonce is new, so a recorded handshake is worth nothing. The two codes have keys of
their own, and both contain both names, so neither can be reflected, or obtained from another worker. Both contain the
worker's certificate as the two ends see it, so nobody can relay the messages between two TLS connections. A caller says
nothing more before the worker has proved itself, nor a worker before the caller has.
"""

import os
from dataclasses import dataclass
from typing import Literal

from cpd.common.errors import CPDError
from cpd.common.stream import Stream, StreamError
from cpd.common.trust import ClusterSecret
from cpd.protocol.version import CAPABILITIES, incompatible, own_version
from cpd.rpc import cpd_pb2 as pb

NONCE_BYTES = 16
_LEAST_NONCE_BYTES = 16

_WORKER, _CALLER = "handshake of a worker", "handshake of a caller"


class HandshakeError(CPDError):
    """One of the two ends refuses the other; the message says why."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that opens a stream."""

    role: Literal["router", "worker"]
    id: str

    def __str__(self) -> str:
        return f"{self.role} {self.id}"


async def open_as(caller: Caller, stream: Stream[pb.WorkerMessage], worker_id: str, secret: ClusterSecret) -> None:
    """Opens a stream to a worker. Its Hello or End is the next message.

    Args:
        worker_id: The worker that must be at the other end.

    Raises:
        HandshakeError: The worker refuses this process, or is not the one that it should be.
        StreamError: The connection broke.
    """
    nonce = os.urandom(NONCE_BYTES)
    hello = pb.RouterHello(version=own_version(), capabilities=CAPABILITIES, nonce=nonce)
    if caller.role == "router":
        hello.router_id = caller.id
    else:
        hello.worker_id = caller.id
    stream.send(pb.RouterMessage(hello=hello))
    answer = await stream.receive()
    if answer is None:
        raise StreamError("it closed the stream within the handshake")
    if answer.WhichOneof("kind") == "end":
        raise HandshakeError(answer.end.reason)
    challenge = answer.challenge  # without one: an old worker, which has version 0.0
    if reason := incompatible(str(caller), f"worker {worker_id}", challenge.version):
        raise HandshakeError(reason)
    if challenge.worker_id != worker_id:
        raise HandshakeError(f"the worker there is {challenge.worker_id!r}, not {worker_id!r}")
    parts = _transcript(stream.certificate, hello, challenge)
    if not secret.verify(challenge.proof, _WORKER, *parts):
        raise HandshakeError(f"worker {worker_id} does not prove the cluster's secret: {_doubt(challenge.proof)}")
    stream.send(pb.RouterMessage(proof=pb.Proof(proof=secret.sign(_CALLER, *parts))))


async def answer_as(worker_id: str, stream: Stream[pb.RouterMessage], secret: ClusterSecret) -> Caller:
    """Lets a caller open a stream to this worker. Give it a deadline.

    Raises:
        HandshakeError: The caller is refused; it has not been told yet.
        StreamError: The connection broke.
    """
    hello = (await _next(stream)).hello
    caller = Caller("router", hello.router_id) if hello.router_id else Caller("worker", hello.worker_id)
    if not (caller.id and caller.id.isprintable()):
        raise HandshakeError("a stream starts with a RouterHello with router_id or worker_id")
    if reason := incompatible(f"worker {worker_id}", str(caller), hello.version):
        raise HandshakeError(reason)
    if len(hello.nonce) < _LEAST_NONCE_BYTES:
        raise HandshakeError(f"the nonce of {caller} is too short")
    challenge = pb.Challenge(
        worker_id=worker_id, version=own_version(), capabilities=CAPABILITIES, nonce=os.urandom(NONCE_BYTES)
    )
    parts = _transcript(stream.certificate, hello, challenge)
    challenge.proof = secret.sign(_WORKER, *parts)
    stream.send(pb.WorkerMessage(challenge=challenge))
    try:
        message = await _next(stream)
    except StreamError as error:
        raise HandshakeError(
            f"{caller} did not answer the challenge, perhaps because of another secret: {error}"
        ) from None
    if message.WhichOneof("kind") != "proof":
        raise HandshakeError(f"{caller} did not answer the challenge")
    proof = message.proof.proof
    if not secret.verify(proof, _CALLER, *parts):
        raise HandshakeError(f"{caller} does not prove the cluster's secret: {_doubt(proof)}")
    return caller


async def _next(stream: Stream[pb.RouterMessage]) -> pb.RouterMessage:
    message = await stream.receive()
    if message is None:
        raise StreamError("it closed the stream within the handshake")
    return message


def _doubt(proof: bytes) -> str:
    if not proof:
        return "it was started without one"
    return "it has another one, or repeats what somebody else has said"


def _transcript(certificate: bytes, hello: pb.RouterHello, challenge: pb.Challenge) -> list[bytes]:
    """Returns what both codes cover. Both ends make it from the same two messages."""
    versions = (hello.version.major, hello.version.minor, challenge.version.major, challenge.version.minor)
    return [
        certificate,
        hello.router_id.encode(),
        hello.worker_id.encode(),
        challenge.worker_id.encode(),
        hello.nonce,
        challenge.nonce,
        ".".join(map(str, versions)).encode(),
        ",".join(hello.capabilities).encode(),
        ",".join(challenge.capabilities).encode(),
    ]
