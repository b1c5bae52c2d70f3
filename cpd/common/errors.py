"""Typed errors of every layer. Each process turns them into wire or HTTP errors in one place."""


class CPDError(Exception):
    """Base of all errors raised on purpose. The message tells the user what to do."""


class ConfigError(CPDError):
    """A setting is missing, malformed or contradicts another one."""


class CheckpointError(CPDError):
    """A model directory cannot be served: a file is missing, damaged or of an unsupported kind."""


class QueueFullError(CPDError):
    """A bounded waiting queue has no room.

    Args:
        message: What is full.
        retry_after_s: When trying again is sensible, in seconds.
        over_share: It is full for this tenant, which has its share of it; there may be room for others.
    """

    def __init__(self, message: str, retry_after_s: float, *, over_share: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.over_share = over_share


class TransferError(CPDError):
    """A KV transfer was refused, was cancelled, or lost its peer."""


class StaleTransferError(TransferError):
    """The peer's pool epoch or the reservation's generation is no longer valid."""
