"""Which bytes move: segments of pages, and the memory addresses of runs of pages."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.base import PoolMemory, Segment

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` pages that are contiguous in both pools: own pages from `page`, the ticket's indices from `index`."""

    page: int
    index: int
    count: int


def problem_with(segments: Iterable[Segment], page_bytes: int) -> str:
    """Why these can't be segments of the receiver's pages, which have `page_bytes`. Empty if they can."""
    end = 0
    for part in sorted(segments, key=lambda part: part.target):
        if part.num_bytes <= 0 or not 0 <= part.target <= page_bytes - part.num_bytes:
            return f"are not inside pages of {page_bytes} bytes"
        if part.target < end:
            return "overlap"
        end = part.target + part.num_bytes
    return ""


def layout_of(segments: Sequence[Segment]) -> int:
    """A digest of segments, which tells both ends if theirs differ. 0 for whole pages."""
    if not segments:
        return 0
    numbers = repr([astuple(part) for part in segments]).encode()
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little")


def resolve_runs(
    own: PoolMemory, theirs: PoolMemory, runs: Sequence[Run], places: Sequence[int], segments: Sequence[Segment]
) -> tuple[Addresses, Addresses, Addresses]:
    """Resolves runs of pages to memory: source addresses, target addresses and numbers of bytes.

    Args:
        own: The sender's pool.
        theirs: The receiver's pool.
        runs: Pages to copy; runs of one page if there are segments.
        places: For each run, the receiver's first page.
        segments: Parts of each page. Empty for whole pages.
    """
    own_pages, their_pages = np.array([run.page for run in runs], np.uint64), np.array(places, np.uint64)
    counts = np.array([run.count for run in runs], np.uint64)
    sources = np.uint64(own.pointer) + own_pages * np.uint64(own.page_bytes)
    targets = np.uint64(theirs.pointer) + their_pages * np.uint64(theirs.page_bytes)
    if not segments:
        return sources, targets, counts * np.uint64(own.page_bytes)
    parts = np.array([astuple(part) for part in segments], np.uint64)
    num_bytes = counts[:, None] * parts[:, 2]
    return (sources[:, None] + parts[:, 0]).ravel(), (targets[:, None] + parts[:, 1]).ravel(), num_bytes.ravel()
