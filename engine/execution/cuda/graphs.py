"""Decode steps as CUDA graphs: one launch per step instead of one per kernel.

    capture   once for each of a few batch sizes, on the lane's stream, so that a graph stays on the lane's SMs
    run       copies inputs to the graph's buffers, plans the attention, replays; pads batches to the next size

A graph spans everything from the embedding to the final norm, without the head, whose outputs for all sizes would need
more memory than the rest. Padding decodes one token on a spare page that belongs to no sequence.

The graphs of a lane never run concurrently, and share a memory pool, inputs and page tables.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.batch import Batch, IntArray
from engine.model.decoder import Decoder
from engine.ops.base import DeviceBatch, Ops
from engine.ops.buffers import upload_arrays, upload_size

log = logging.getLogger(__name__)

Captured = TypeVar("Captured")

WARM_UPS = 2
"""Runs before a capture, which compile and load kernels and let cuBLAS choose algorithms and workspace."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured batch size.

    Attributes:
        model: Decoder whose `prepare` plans steps of this size.
        hidden: Output of a replay: [size, H].
    """

    model: Decoder
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


class DecodeGraphs:
    """The graphs of one lane, which runs one step at a time.

    Args:
        model: Decoder with the ops of the lane's other steps.
        ops_of_size: See `Ops.capturable_decodes`.
        kv: Each layer's [num_pages, 2, Hkv, BS, D].
        spare_page: Page for padding, of no sequence.
        max_decodes: Most decodes of a captured step.
        stream: Stream of the lane.
    """

    def __init__(
        self,
        model: Decoder,
        ops_of_size: Callable[[int], Ops],
        kv: Sequence[torch.Tensor],
        *,
        spare_page: int,
        max_decodes: int,
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self.sizes = graph_sizes(max_decodes)
        self._model = model
        self._ops_of_size = ops_of_size
        self._kv = kv
        self._spare_page = spare_page
        self._stream = stream
        self._device = device
        lengths = [max_decodes] * 3 + [max_decodes + 1, max_decodes]
        with torch.cuda.stream(stream):
            self._inputs = torch.zeros(upload_size(lengths), dtype=torch.int32, device=device)
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def capture(self, what: str, on_captured: Callable[[], None]) -> None:
        """Captures every size, the largest first, so that the others reuse its memory. Nothing else may use the
        device's allocator meanwhile.

        Args:
            what: Name of the lane, for the log.
            on_captured: Called after each size.
        """
        pool = torch.cuda.graph_pool_handle()
        self._graphs = capture_sizes(
            self.sizes, lambda size: self._capture(size, pool), f"decodes on the {what} lane", self._device, on_captured
        )

    def fits(self, batch: Batch) -> bool:
        """True if there is a graph for this step."""
        return batch.num_decodes == len(batch.context_lens) <= self.sizes[-1]

    def run(self, batch: Batch, fill_token_ids: Callable[[DeviceBatch], None]) -> torch.Tensor:
        """Computes a step that fits, on the lane's stream, which must be the current one.

        Args:
            fill_token_ids: Called when the inputs have been copied, before they are used.

        Returns:
            Inputs of the head for each token, then for padding: [>= T, H]. Valid until the next run.
        """
        graph = self._graphs[self.sizes[bisect_left(self.sizes, batch.num_decodes)]]
        loaded = self._load(pad(batch, len(graph.hidden), self._spare_page))
        fill_token_ids(loaded)
        graph.model.prepare(loaded)
        graph.graph.replay()
        return graph.hidden

    def _load(self, batch: Batch) -> DeviceBatch:
        """Copies a padded batch to its graph's buffers."""
        arrays = (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_lens)
        return DeviceBatch.over(batch, upload_arrays(arrays, self._device, self._inputs))

    def _capture(self, size: int, pool: Any) -> _Graph:
        with torch.cuda.stream(self._stream):
            model = self._model.with_ops(self._ops_of_size(size))
            batch = self._load(padding(size, self._spare_page))
            model.prepare(batch)
            for _ in range(WARM_UPS):
                model.head(model.hidden(batch, self._kv))
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # By default CUDA calls of any other thread would invalidate the capture.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                hidden = model.hidden(batch, self._kv)
        return _Graph(model, graph, hidden)


def capture_sizes(
    sizes: Sequence[int],
    capture: Callable[[int], Captured],
    what: str,
    device: torch.device,
    on_captured: Callable[[], None],
) -> dict[int, Captured]:
    """Captures every size, the largest first, so that the others reuse its memory, and logs time and memory.

    Args:
        what: What is captured and where, for the log.
        on_captured: Called after each size.
    """
    start_s, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    captured: dict[int, Captured] = {}
    for size in reversed(sizes):
        captured[size] = capture(size)
        on_captured()
    log.info(
        "captured graphs of %d sizes up to %d for %s in %.1f s, %d MiB",
        len(sizes),
        sizes[-1],
        what,
        time.perf_counter() - start_s,
        (free - torch.cuda.mem_get_info(device)[0]) >> 20,
    )
    return captured


def graph_sizes(most: int) -> list[int]:
    """Returns the batch sizes to capture: 1, 2, 4, 8, 16, then in steps of a third to a half, up to `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


def padding(size: int, spare_page: int) -> Batch:
    """Makes a step of `size` decodes of padding."""
    zeros, ones = np.zeros(size, np.int32), np.ones(size, np.int32)
    return Batch(
        token_ids=zeros,
        positions=zeros,
        slots=np.full(size, spare_page * BLOCK_SIZE, np.int32),
        query_start=np.arange(size + 1, dtype=np.int32),
        context_lens=ones,
        block_tables=np.full((size, 1), spare_page, np.int32),
        num_decodes=size,
        samples=[],
    )


def pad(batch: Batch, size: int, spare_page: int) -> Batch:
    """Pads a step of decodes to `size`. The samples do not change."""
    missing = size - batch.num_decodes
    if not missing:
        return batch
    more = padding(missing, spare_page)
    tables: IntArray = np.zeros((size, batch.block_tables.shape[1]), np.int32)
    tables[: batch.num_decodes] = batch.block_tables
    tables[batch.num_decodes :, :1] = more.block_tables
    return replace(
        batch,
        token_ids=np.concatenate((batch.token_ids, more.token_ids)),
        positions=np.concatenate((batch.positions, more.positions)),
        slots=np.concatenate((batch.slots, more.slots)),
        query_start=np.arange(size + 1, dtype=np.int32),
        context_lens=np.concatenate((batch.context_lens, more.context_lens)),
        block_tables=tables,
        num_decodes=size,
    )
