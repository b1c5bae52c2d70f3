"""What no worker can mean, found where its messages come in: figures that passed stay numbers in whatever is predicted
from them, and what is kept or shown of them is bounded."""

from collections.abc import Collection

from cpd.errors import CPDError
from cpd.perfmodel import MOST_MS, MOST_SLOWDOWN
from cpd.rpc import cpd_pb2 as pb

MOST_TOKENS = 1 << 40
"""On one worker."""

MOST_SEQUENCES = 1 << 24

MOST_NAMED = 4096
"""Requests that a report names: the newest ones."""

MOST_NAMES, MOST_NAME = 64, 64
"""Outcomes and reasons that a worker counts, and characters of each: metrics have a series for each."""

MOST_TEXT = 500
"""Characters of what a worker says of itself."""

MOST_OUTPUTS = 1 << 13
"""In one message."""

_STATES = frozenset(pb.State.values())


class NonsenseError(CPDError):
    """The worker sent what can't be; the message says what. It is refused for a while."""


def check_hello(hello: pb.Hello) -> None:
    """Raises NonsenseError where what a worker says of itself can't be, or can't be shown."""
    for name in ("dtype", "device", "transport", "transport_reason"):
        if len(getattr(hello, name)) > MOST_TEXT:
            raise NonsenseError(f"its {name} has {len(getattr(hello, name))} characters")
    _require_known(hello.state, _STATES, "state")
    if not 0 <= hello.host_page_ms <= MOST_MS:
        raise NonsenseError(f"it said that it copies a page back from host memory in {hello.host_page_ms} ms")


def check_load(load: pb.Load, num_pages: int) -> None:
    """Raises NonsenseError where a worker with so many pages can't have such a load."""
    _require_known(load.state, _STATES, "state")
    if not (0 <= load.prefill_ms <= MOST_MS and 0 <= load.step_ms <= MOST_MS):
        raise NonsenseError(f"it reported prompts of {load.prefill_ms} ms and steps of {load.step_ms} ms")
    if not 0 <= load.late_ms <= load.prefill_ms:
        raise NonsenseError(f"it reported {load.late_ms} ms of late prompts, of {load.prefill_ms} ms in all")
    if not 0 <= load.slower <= MOST_SLOWDOWN:
        raise NonsenseError(f"it reported steps that take {load.slower} times as long as predicted")
    pages = load.free_pages + load.cached_pages + load.used_pages + load.reserved_pages + load.quarantined_pages
    if pages > num_pages:
        raise NonsenseError(f"it reported {pages} pages, but it has only {num_pages}")
    tokens = max(load.waiting_tokens, load.queued_tokens, load.decode_context)
    if tokens > MOST_TOKENS:
        raise NonsenseError(f"it reported {tokens} tokens, which no worker can have")
    sequences = max(load.running, load.waiting, load.decodes)
    if sequences > MOST_SEQUENCES:
        raise NonsenseError(f"it reported {sequences} sequences, which no worker can have")
    if len(load.unanswered) > MOST_NAMED:
        raise NonsenseError(f"it named {len(load.unanswered)} requests in one report")
    for counts in (load.fills, load.fill_failures, load.host_blocks):
        if len(counts) > MOST_NAMES or any(len(name) > MOST_NAME for name in counts):
            raise NonsenseError(f"it counted {len(counts)} kinds of things, or one with too long a name")


def check_step(step: pb.StepOutput) -> None:
    """Raises NonsenseError where no step has such an output."""
    if len(step.outputs) > MOST_OUTPUTS:
        raise NonsenseError(f"it sent {len(step.outputs)} outputs in one message")


def check_refusal(refusal: pb.Refusal) -> None:
    """Raises NonsenseError where a refusal says nothing."""
    if refusal.kind == pb.Refusal.KIND_UNSPECIFIED:
        raise NonsenseError("it gave a request back without saying why")
    _require_known(refusal.kind, pb.Refusal.Kind.values(), "kind of refusal")


def _require_known(value: int, known: Collection[int], name: str) -> None:
    if value not in known:
        raise NonsenseError(f"it sent the {name} {value}, which there is not")
