"""A worker that only has a gRPC port."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from cpd.common.trust import ClusterSecret
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from tests.secret import SECRET

ADMIN_KEY = ClusterSecret(SECRET).admin_key


class AdminService(rpc.AdminServicer):
    """The administration service of a worker.

    Args:
        refusal: Why it refuses what it is told; empty: it does not.
        key: The cluster's admin key.

    Attributes:
        told: What it was told, in order.
    """

    def __init__(self, refusal: str = "", key: str = ADMIN_KEY) -> None:
        self.told: list[str] = []
        self._refusal = refusal
        self._key = key

    def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepReply:  # noqa: N802
        """Records the call, or refuses it."""
        self._hear("sleep", context)
        return pb.SleepReply()

    def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeReply:  # noqa: N802
        """Records the call."""
        self._hear("wake", context)
        return pb.WakeReply()

    def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:  # noqa: N802
        """Records the call."""
        self._hear("pin" if request.pinned else "unpin", context)
        return pb.PinReply()

    def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:  # noqa: N802
        """Is not called."""
        raise NotImplementedError

    def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleReply:  # noqa: N802
        """Records the call, or refuses it."""
        self._hear("role", context)
        return pb.SetRoleReply()

    def Trace(self, request: pb.TraceRequest, context: Any) -> pb.TraceReply:  # noqa: N802
        """Is not called."""
        raise NotImplementedError

    def _hear(self, call: str, context: Any) -> None:
        assert ("authorization", f"Bearer {self._key}") in context.invocation_metadata()
        if self._refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refusal)
        self.told.append(call)


@contextlib.contextmanager
def listening(service: rpc.AdminServicer | None) -> Iterator[str]:
    """A worker's gRPC port; without a service that of an older version."""
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        if service is not None:
            rpc.add_AdminServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
