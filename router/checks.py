"""Range checks on the figures that workers report.

The cost formula and the JSON responses need finite numbers. A figure out of range ends the session with a
ProtocolError; the router then reconnects with the usual back-off.
"""

from cpd.common.errors import CPDError
from cpd.performance.model import MAX_MS, SLOWDOWN_LIMIT
from cpd.rpc import cpd_pb2 as pb

MAX_TOKENS = 1 << 40
"""Upper bound on the tokens on one worker."""

MAX_SEQUENCES = 1 << 24
"""Upper bound on the sequences on one worker."""


class ProtocolError(CPDError):
    """A worker sent a message that breaks the protocol. The session ends."""


def check_hello(hello: pb.Hello) -> None:
    """Raises ProtocolError if a figure in a worker's Hello is out of range."""
    if not 0 <= hello.host_page_ms <= MAX_MS:
        raise ProtocolError(f"loading a page from host memory takes {hello.host_page_ms} ms")


def check_load(load: pb.Load) -> None:
    """Raises ProtocolError if a figure in a load report is out of range."""
    if not (0 <= load.prefill_ms <= MAX_MS and 0 <= load.step_ms <= MAX_MS):
        raise ProtocolError(f"it reported prompts of {load.prefill_ms} ms and steps of {load.step_ms} ms")
    if not 0 <= load.overdue_ms <= load.prefill_ms:
        raise ProtocolError(f"it reported {load.overdue_ms} ms of overdue prompts out of {load.prefill_ms} ms")
    if not 0 <= load.residency.serves_in_s <= MAX_MS / 1e3:
        raise ProtocolError(f"it promised to serve in {load.residency.serves_in_s} s")
    if not 0 <= load.slowdown <= SLOWDOWN_LIMIT:
        raise ProtocolError(f"it reported a slowdown of {load.slowdown}")
    tokens = max(load.waiting_tokens, load.queued_tokens, load.decode_context)
    if tokens > MAX_TOKENS:
        raise ProtocolError(f"it reported {tokens} tokens")
    sequences = max(load.running, load.waiting, load.decodes)
    if sequences > MAX_SEQUENCES:
        raise ProtocolError(f"it reported {sequences} sequences")
