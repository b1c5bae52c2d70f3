"""Brings processes back that Ray had to start elsewhere, because their machine was lost, when it or another one joins.

A process of the same kind starts on the machine that has joined, under the next free name, and when it is ready, the
displaced one ends its requests and goes. So whatever is wrong with that machine, nothing is lost.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

from cpd.common.errors import CPDError
from deploy.changes import Changes
from deploy.cluster import Cluster, Tell
from deploy.placement import next_move
from deploy.processes import Kind

STEADY_S = 10.0
"""A machine that joins gets processes after this time."""
_POLL_S = 2.0


@contextlib.contextmanager
def evened_out(cluster: Cluster, changes: Changes, busy: threading.Lock, say: Tell) -> Iterator[None]:
    """Evens the cluster out, on a thread of its own, while the context is open.

    Args:
        busy: Held while the cluster changes.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_run, args=(cluster, changes, busy, say, ended), name="even-out", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _run(cluster: Cluster, changes: Changes, busy: threading.Lock, say: Tell, ended: threading.Event) -> None:
    seen: dict[str, float] = {}
    refused: set[tuple[Kind, str]] = set()
    while not ended.wait(_POLL_S):
        if not any(one.displaced for one in cluster.placed()):
            continue
        now, hosts = time.monotonic(), cluster.hosts()
        seen = {node: seen.get(node, now) for node in hosts}
        steady = [node for node, since in seen.items() if now - since >= STEADY_S]
        if not busy.acquire(blocking=False):
            continue
        try:
            if move := next_move(cluster.placed(), steady, refused):
                spec, node = move
                try:
                    changes.move(spec, node, hosts[node], say)
                except CPDError as error:
                    if not ended.is_set():
                        refused.add((spec.kind, node))
                        say(f"{spec.name} stays where it is: {error}")
        finally:
            busy.release()
