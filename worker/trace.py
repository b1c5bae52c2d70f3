"""The engine's step trace on the wire."""

import asyncio
import time
from collections.abc import Mapping

from cpd.rpc import cpd_pb2 as pb
from engine.inflight import LaneName
from worker.engine_bridge import EngineBridge

_LANES: Mapping[LaneName, pb.Lane.ValueType] = {
    "full": pb.LANE_FULL,
    "prefill": pb.LANE_PREFILL,
    "decode": pb.LANE_DECODE,
}
_AT_ONCE = 200
"""Steps converted before other work of the event loop gets its turn: about a millisecond."""


async def read_trace(engine: EngineBridge, seconds: float) -> pb.TraceReply:
    """The steps that began at most `seconds` ago; 0: all that are kept."""
    records = await engine.call(lambda engine: engine.trace.records())
    now_s = time.perf_counter()
    to_unix_s = time.time() - now_s
    if seconds:
        records = [record for record in records if record.start_s >= now_s - seconds]
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
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return reply
