"""How much may be in flight over a connection, and how long its peer may be inactive."""

WINDOW = 4  # batches offered and not done
GREETING_S = 10.0  # to open a connection
AGENT_S = 120.0  # to create a NIXL agent: RDMA devices look up every page of the pool's memory when it is registered
STALL_S = 10.0  # for pages to move
GRACE_S = 2.0  # the same for pages that this side has given up: revoked or cancelled


def patience(*, is_open: bool, owes: bool, given_up: bool) -> float | None:
    """How many seconds a peer may be inactive. None if nothing is expected of it."""
    if not is_open:
        return GREETING_S
    if not owes:
        return None
    return GRACE_S if given_up else STALL_S
