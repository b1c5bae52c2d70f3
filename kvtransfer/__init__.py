"""Moves KV pages between the pools of two processes. `worker/page_sender.py` counts them."""

from kvtransfer.base import Landing, Peer, PoolMemory, Segment, Ticket, Transfer, Transport
from kvtransfer.factory import create

__all__ = ["Landing", "Peer", "PoolMemory", "Segment", "Ticket", "Transfer", "Transport", "create"]
