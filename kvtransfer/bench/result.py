"""The figures of a measurement."""

from statistics import median
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kvtransfer.base import Cost


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Push(_Part):
    """One push, from the call until both sides know that all pages have arrived."""

    ms: float
    sender_cpu_ms: float = Field(description="CPU time of all threads of the sender.")
    receiver_cpu_ms: float = Field(description="CPU time of all threads of the receiver.")


class Cell(_Part):
    """Pushes of one kind."""

    page_bytes: int
    pages: int
    scattered: bool
    pushes: tuple[Push, ...]
    ceilings: tuple[float, ...] = Field(description="Bytes per second of ucx_perftest, run between the pushes.")

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.pages

    @property
    def median_ms(self) -> float:
        return median(push.ms for push in self.pushes)

    @property
    def best_ms(self) -> float:
        return min(push.ms for push in self.pushes)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the median push."""
        return self.num_bytes / self.median_ms * 1e3

    @property
    def best_bytes_per_s(self) -> float:
        return self.num_bytes / self.best_ms * 1e3

    @property
    def median_share(self) -> float | None:
        """Median push over the median of ucx_perftest's runs."""
        return self.bytes_per_s / median(self.ceilings) if self.ceilings else None

    @property
    def best_share(self) -> float | None:
        """Best push over the best of ucx_perftest's runs."""
        return self.best_bytes_per_s / max(self.ceilings) if self.ceilings else None

    @property
    def cpu_us_per_page(self) -> tuple[float, float]:
        """The sender's and the receiver's CPU time in microseconds per page, each the least of all pushes."""
        sender = min(push.sender_cpu_ms for push in self.pushes)
        receiver = min(push.receiver_cpu_ms for push in self.pushes)
        return 1e3 * sender / self.pages, 1e3 * receiver / self.pages


class TransferResult(_Part):
    """All figures of a run."""

    schema_name: Literal["cpd-bench-transfer/1"] = Field("cpd-bench-transfer/1", alias="schema")
    transport: str
    route: str = Field(description="How pages travelled: see `kvtransfer.base.Route`.")
    machine: str
    ceiling: str = Field(description="The ucx_perftest command, or why it did not run.")
    cells: tuple[Cell, ...]

    def cost(self) -> Cost:
        """The cost of a transfer: the line with the least relative errors through the medians."""
        sizes = np.array([cell.num_bytes for cell in self.cells], np.float64)
        times = np.array([cell.median_ms for cell in self.cells], np.float64)
        if len(set(sizes)) < 2:
            return Cost(0.0, float((sizes / times).max()))
        design = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
        (fixed_ms, ms_per_byte), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
        if ms_per_byte * sizes.max() < 0.01 * times.max():  # the larger ones took no longer
            return Cost(0.0, float((sizes / times).max()))
        return Cost(max(0.0, float(fixed_ms)), float(1 / ms_per_byte))
