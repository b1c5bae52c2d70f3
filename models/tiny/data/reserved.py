"""What training never sees: a tenth of all facts and requests, kept for evaluation."""

from zlib import crc32


def is_reserved(text: str) -> bool:
    """Whether `text` is for evaluation only. The same for the same text, anywhere."""
    return crc32(text.encode()) % 10 == 0
