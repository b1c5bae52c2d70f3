"""Decode steps as CUDA graphs: one launch instead of one a kernel.

    capture   once for each of a few batch sizes, on the lane's stream: the graph stays on the lane's part of the device
    run       inputs → buffers that the graph knows, FlashInfer's plan, replay; a batch is padded to the next size

Captured is everything from the embedding to the last norm. The head is not: its outputs for all sizes would need more
memory than the rest. Padding decodes one token at the start of a page that no sequence has.

All graphs of a lane share one pool of memory, their inputs and their page tables: they run one after another.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.batch import Batch, IntArray
from engine.model.decoder import Decoder
from engine.ops.base import DeviceBatch
from engine.ops.buffers import pack, packed_size
from engine.ops.flashinfer_ops import FlashInferOps, PageBuffer

log = logging.getLogger(__name__)

_WARM_UPS = 2
"""Eager runs before a capture: kernels are compiled and loaded, cuBLAS chooses its algorithms and workspace."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured size.

    Attributes:
        model: Its `prepare` plans a step of this size.
        hidden: What a replay computes: [size, H].
    """

    model: Decoder
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor


class DecodeGraphs:
    """The graphs of one lane, which runs one step at a time.

    Args:
        model: Its ops are `ops`.
        ops: Shared with the lane's other steps.
        kv: For each layer [num_pages, 2, Hkv, BS, D].
        spare_page: That no sequence has, for padding.
        most_decodes: Of a captured step.
        most_pages: Of one sequence.
        stream: The lane's.
    """

    def __init__(
        self,
        model: Decoder,
        ops: FlashInferOps,
        kv: Sequence[torch.Tensor],
        *,
        spare_page: int,
        most_decodes: int,
        most_pages: int,
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self.sizes = graph_sizes(most_decodes)
        self._model = model
        self._ops = ops
        self._kv = kv
        self._spare_page = spare_page
        self._stream = stream
        self._device = device
        lengths = [most_decodes] * 3 + [most_decodes + 1, most_decodes]
        with torch.cuda.stream(stream):
            self._pages = PageBuffer(most_decodes, most_pages, device)
            self._inputs = torch.zeros(packed_size(lengths), dtype=torch.int32, device=device)
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def capture(self, what: str, on_captured: Callable[[], None]) -> None:
        """Captures every size, the largest first, so that the others fit into its memory. Nothing else may use the
        device's allocator meanwhile.

        Args:
            what: The lane's name, for the log.
            on_captured: Called after each size.
        """
        start_s, free = time.perf_counter(), torch.cuda.mem_get_info(self._device)[0]
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            self._graphs[size] = self._capture(size, pool)
            on_captured()
        log.info(
            "captured decode graphs of %d sizes up to %d on the %s lane in %.1f s, %d MiB",
            len(self.sizes),
            self.sizes[-1],
            what,
            time.perf_counter() - start_s,
            (free - torch.cuda.mem_get_info(self._device)[0]) >> 20,
        )

    def fits(self, batch: Batch) -> bool:
        """Whether there is a graph for this step."""
        return batch.num_decodes == len(batch.context_lens) <= self.sizes[-1]

    def run(self, batch: Batch, feed: Callable[[DeviceBatch], None]) -> torch.Tensor:
        """Computes a step that fits, on the current stream, which is the lane's.

        Args:
            feed: Called when the inputs are in their place, and before they are used.

        Returns:
            [>= T, H]: of each token what the head makes its logits of; then of padding. Valid until the next run.
        """
        graph = self._graphs[self.sizes[bisect_left(self.sizes, batch.num_decodes)]]
        loaded = self._load(pad(batch, len(graph.hidden), self._spare_page))
        feed(loaded)
        graph.model.prepare(loaded)
        graph.graph.replay()
        return graph.hidden

    def _load(self, batch: Batch) -> DeviceBatch:
        """A padded batch in the buffers that its graph knows."""
        arrays = (batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_lens)
        return DeviceBatch.over(batch, pack(arrays, self._device, self._inputs))

    def _capture(self, size: int, pool: Any) -> _Graph:
        with torch.cuda.stream(self._stream):
            model = self._model.on(self._ops.graphed(size, self._pages))
            batch = self._load(padding(size, self._spare_page))
            model.prepare(batch)
            for _ in range(_WARM_UPS):
                model.head(model.hidden(batch, self._kv))
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on meanwhile; by default whatever they do would spoil the capture.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                hidden = model.hidden(batch, self._kv)
        return _Graph(model, graph, hidden)


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, 16, then in steps of a third to a half, up to `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


def padding(size: int, spare_page: int) -> Batch:
    """A step of `size` decodes of padding."""
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
    """A step of decodes with padding behind it, up to `size`. The samples stay."""
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
