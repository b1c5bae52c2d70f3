"""How much may be under way over a connection, and how long its peer may do nothing, in seconds."""

WINDOW = 4  # batches offered and not done
GREETING_S = 10.0  # to open a connection
AGENT_S = 120.0  # to make a NIXL agent: it registers a whole pool, in which RDMA devices look up every page of memory
STALL_S = 10.0  # for pages to move
GRACE_S = 2.0  # for pages to move that this side has given up: revoked, cancelled


def patience(*, is_open: bool, owes: bool, given_up: bool) -> float | None:
    """How long a peer may do nothing. None: it owes nothing."""
    if not is_open:
        return GREETING_S
    if not owes:
        return None
    return GRACE_S if given_up else STALL_S
