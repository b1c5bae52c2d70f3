"""Moves KV pages between the pools of two processes."""

from kvtransfer.base import Landing, Peer, PoolMemory, Segment, Ticket, Transfer, Transport
from kvtransfer.factory import create

__all__ = ["Landing", "Peer", "PoolMemory", "Segment", "Ticket", "Transfer", "Transport", "create"]
