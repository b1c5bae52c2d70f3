"""gRPC connections to other workers."""

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from cpd.rpc import cpd_pb2_grpc as rpc

if TYPE_CHECKING:  # the generated stubs name the asynchronous stub for type checkers only
    from cpd.rpc.cpd_pb2_grpc import WorkerAsyncStub

MAX_MESSAGE_BYTES = 64 << 20
"""A prompt of a million tokens with its hashes is about 4 MiB."""

MAX_IDLE = 64

# A host that is gone, or a process that is stopped, is noticed after at most the sum of both, also on a stream that is
# silent. The keepalive timeout alone sees only what TCP sees, and a stopped process's kernel still acknowledges: its
# missing answers count from the ping timeout.
KEEPALIVE_MS = 3_000
KEEPALIVE_TIMEOUT_MS = 5_000

CLIENT_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # that of the environment is for the outside world
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """One connection an address, shared by all calls; the longest idle ones are closed when there are many."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> "AsyncIterator[WorkerAsyncStub]":
        """The stub of the worker at `address`; the connection stays open at least as long as the context."""
        entry = self._entries.get(address)
        if entry is None:
            entry = _Entry(grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS))
            self._entries[address] = entry
        self._entries.move_to_end(address)
        entry.users += 1
        try:
            yield rpc.WorkerStub(entry.channel)
        finally:
            entry.users -= 1
            await self._close_idle(keep=MAX_IDLE)

    async def close(self) -> None:
        """Closes every connection."""
        entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            await entry.channel.close(None)

    async def _close_idle(self, keep: int) -> None:
        idle = [address for address, entry in self._entries.items() if not entry.users]
        for address in idle[: max(len(idle) - keep, 0)]:
            await self._entries.pop(address).channel.close(None)
