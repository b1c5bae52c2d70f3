"""Steps with prompts as piecewise CUDA graphs: everything between the attentions of two layers is one graph.

Starting such a step kernel by kernel takes the host longer than small steps take the device, and keeps the interpreter
from the thread that starts the decodes. Attention stays out of the graphs: its launch depends on the sequences.

    first graph      embedding, norm, queries and stored keys and values of the first layer
    attention        of layer i, launched for the step's own tokens
    graph i + 1      the rest of layer i, and queries and stored keys and values of layer i + 1
    after the last   the head's input, computed kernel by kernel for the sampled tokens only

A step is padded to the next size. The padding's keys and values go to a spare page that belongs to no sequence.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.batch import Batch
from engine.execution.cuda.graphs import WARM_UPS, capture_sizes, padding
from engine.model.decoder import Decoder
from engine.ops.base import DeviceBatch, FixedBuffers
from engine.ops.buffers import upload_arrays, upload_size

SIZES = (16, 32, 64, 128, 192, 256, 384, 512)
"""Tokens of the captured steps. Larger steps take the device longer than the host takes to start them."""


class PiecewiseGraphs:
    """The graphs of one lane, which runs one step at a time.

    Args:
        model: Decoder with ops of `Ops.with_fixed_buffers`.
        buffers: Their buffers, for `SIZES[-1]` tokens.
        kv: Each layer's [num_pages, 2, Hkv, BS, D].
        spare_page: Page for padding, of no sequence.
        stream: Stream of the lane.
    """

    def __init__(
        self,
        model: Decoder,
        buffers: FixedBuffers,
        kv: Sequence[torch.Tensor],
        *,
        spare_page: int,
        stream: torch.cuda.Stream,
        device: torch.device,
    ) -> None:
        self._model = model
        self._layers = model.layer_by_layer()
        self._buffers = buffers
        self._kv = kv
        self._spare_page = spare_page
        self._stream = stream
        self._device = device
        most = SIZES[-1]
        with torch.cuda.stream(stream), torch.inference_mode():
            size = upload_size([most, most, most, most + 1, most])
            self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
            self._residual = model.embed(self._inputs[:most])  # [most, H]
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}

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
            SIZES, lambda size: self._capture(size, pool), f"prompts on the {what} lane", self._device, on_captured
        )

    def fits(self, batch: Batch) -> bool:
        """True if there are graphs for this step."""
        return len(batch.token_ids) <= SIZES[-1]

    def run(
        self, batch: Batch, rows: torch.Tensor | None, fill_token_ids: Callable[[DeviceBatch], None]
    ) -> torch.Tensor | None:
        """Computes a step that fits, on the lane's stream, which must be the current one.

        Args:
            rows: See `Decoder.forward`.
            fill_token_ids: Called when the inputs have been copied, before they are used.

        Returns:
            Inputs of the head: [R, H]; None if R is 0.
        """
        tokens = len(batch.token_ids)
        size = SIZES[bisect_left(SIZES, tokens)]
        loaded = self._load(batch, size)
        fill_token_ids(loaded)
        self._model.prepare(loaded)
        first, *others = self._graphs[size]
        first.replay()
        queries, layers = self._buffers.queries[:tokens], self._layers
        for index, graph in enumerate(others):
            layers.attention(index, queries, loaded, self._kv)
            graph.replay()
            layers.stack.progress[0] += 1
        return layers.last_hidden(queries, self._residual[:tokens], loaded, self._kv, rows)

    def _load(self, batch: Batch, size: int) -> DeviceBatch:
        """Copies a step to the graphs' inputs. Token ids, positions and slots are padded there to `size`."""
        missing = size - len(batch.token_ids)
        zeros = np.zeros(missing, np.int32)
        arrays = (
            np.concatenate((batch.token_ids, zeros)),
            np.concatenate((batch.positions, zeros)),
            np.concatenate((batch.slots, np.full(missing, self._spare_page * BLOCK_SIZE, np.int32))),
        )
        uploaded = upload_arrays((*arrays, batch.query_start, batch.context_lens), self._device, self._inputs)
        return DeviceBatch.over(batch, [*(array[: len(batch.token_ids)] for array in uploaded[:3]), *uploaded[3:]])

    def _capture(self, size: int, pool: Any) -> list[torch.cuda.CUDAGraph]:
        with torch.cuda.stream(self._stream):
            pieces = self._pieces(self._load(padding(size, self._spare_page), size))
            for _ in range(WARM_UPS):
                for piece in pieces:
                    piece()
            self._stream.synchronize()
            graphs = [torch.cuda.CUDAGraph() for _ in pieces]
            for graph, piece in zip(graphs, pieces, strict=True):
                # By default CUDA calls of any other thread would invalidate the capture.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    piece()
        return graphs

    def _pieces(self, batch: DeviceBatch) -> list[Callable[[], object]]:
        """Returns what each graph of a step computes."""
        layers, kv = self._layers, self._kv
        residual, attended = (buffer[: batch.num_tokens] for buffer in (self._residual, self._buffers.attended))

        def first() -> None:
            residual.copy_(self._model.embed(batch.token_ids))
            layers.first_queries(residual, batch, kv)

        others = [
            partial(layers.next_queries, index, attended, residual, batch, kv)
            for index in range(len(layers.stack.layers) - 1)
        ]
        return [first, *others]
