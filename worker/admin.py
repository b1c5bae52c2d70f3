"""The administration service of a worker: drain it, change its role, put its model to sleep, or read its step trace."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from cpd.common.lifecycle import MAX_DRAIN_S, Lifecycle
from cpd.common.process import EXIT_DRAINED
from cpd.common.settings import Role
from cpd.rpc import cpd_pb2 as pb
from cpd.rpc import cpd_pb2_grpc as rpc
from engine.inflight import LaneKind
from worker.async_engine import AsyncEngine
from worker.residency import Residency

_LANES: Mapping[LaneKind, pb.Lane.ValueType] = {
    "full": pb.LANE_FULL,
    "prefill": pb.LANE_PREFILL,
    "decode": pb.LANE_DECODE,
}
_ROLES: Mapping[int, Role] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_COMBINED: "combined"}
_STEPS_AT_ONCE = 200
"""Steps converted before the event loop's other tasks run: about 1 ms."""


class AdminServicer(rpc.AdminServicer):
    """Serves `Admin` of proto/cpd.proto."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: AsyncEngine,
        set_role: Callable[[Role], None],
        residency: Residency | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._engine = engine
        self._set_role = set_role
        self._residency = residency

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DrainReply:
        """Starts to drain the worker."""
        timeout_s = min(request.timeout_s, MAX_DRAIN_S) if request.HasField("timeout_s") else None
        self._lifecycle.drain("asked to", EXIT_DRAINED, timeout_s)
        return pb.DrainReply()

    async def SetRole(  # noqa: N802
        self, request: pb.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetRoleReply:
        """Changes the worker's role."""
        if (role := _ROLES.get(request.role)) is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this worker knows no role {request.role}")
        elif self._residency is not None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "models share this worker's device (--device-memory), and workers of both roles would take the model's "
                "memory twice there: it keeps its role",
            )
        else:
            self._set_role(role)
        return pb.SetRoleReply()

    async def Sleep(  # noqa: N802
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SleepReply:
        """Begins to put the model to sleep."""
        (await self._shared(context)).sleep()
        return pb.SleepReply()

    async def Wake(  # noqa: N802
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WakeReply:
        """Begins to wake the model."""
        (await self._shared(context)).wake()
        return pb.WakeReply()

    async def Pin(  # noqa: N802
        self, request: pb.PinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PinReply:
        """Says whether other models may displace this one."""
        (await self._shared(context)).pin(request.pinned)
        return pb.PinReply()

    async def _shared(self, context: grpc.aio.ServicerContext[Any, Any]) -> Residency:
        """Returns what decides whether the model sleeps; ends the call if nothing does."""
        if self._residency is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "models do not share this worker's device (--device-memory)"
            )
            raise AssertionError("unreachable: abort raises")
        return self._residency

    async def Trace(  # noqa: N802
        self, request: pb.TraceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TraceReply:
        """Returns the steps that began at most `seconds` ago; 0: all that are kept."""
        records = await self._engine.call(lambda engine: engine.trace.records())
        now_s = time.perf_counter()
        to_unix_s = time.time() - now_s
        if request.seconds:
            records = [record for record in records if record.start_s >= now_s - request.seconds]
        reply = pb.TraceReply()
        for index, record in enumerate(records):
            reply.steps.add(
                lane=_LANES[record.lane],
                share=record.share,
                start_s=record.start_s + to_unix_s,
                ms=record.ms,
                decodes=record.decodes,
                decode_context=record.decode_context,
                prefills=record.prefills,
                prefill_tokens=record.prefill_tokens,
                prefill_context=record.prefill_context,
                waiting=record.waiting,
                waiting_tokens=record.waiting_tokens,
            )
            if index % _STEPS_AT_ONCE == _STEPS_AT_ONCE - 1:
                await asyncio.sleep(0)
        return reply
