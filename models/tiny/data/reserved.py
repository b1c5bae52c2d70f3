"""Reserves a tenth of all facts and requests for evaluation; training never sees them."""

from zlib import crc32


def is_reserved(text: str) -> bool:
    """True if `text` is reserved for evaluation, by a hash of it."""
    return crc32(text.encode()) % 10 == 0
