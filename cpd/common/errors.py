"""Typed errors of all layers. Each process turns them into wire or HTTP errors in one place."""


class CPDError(Exception):
    """Base class. The message tells the user what to do."""


class ConfigError(CPDError):
    """A setting is missing, malformed or contradicts another one."""


class CheckpointError(CPDError):
    """A checkpoint cannot be served: a file is missing, damaged or unsupported."""


class QueueFullError(CPDError):
    """A waiting queue is full.

    Args:
        retry_after_s: When to try again, in seconds.
        over_share: True if it is full for this tenant only, which has its share of it.
    """

    def __init__(self, message: str, retry_after_s: float, *, over_share: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.over_share = over_share


class TransferError(CPDError):
    """A KV transfer was refused, was cancelled, or lost its peer."""


class StaleTransferError(TransferError):
    """The peer's pool epoch or the reservation's generation is no longer valid."""
