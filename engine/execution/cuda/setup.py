"""Prepares a GPU's lanes for serving: partitions, streams, captured graphs, compiled kernels, allocated memory."""

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cpd.common.blocks import blocks_for
from engine.execution.cpu.lanes import ThreadLane
from engine.execution.cuda import warm_up
from engine.execution.cuda.driver import CudaDriver, CudaError, CudaUnavailableError
from engine.execution.cuda.graphs import DecodeGraphs, graph_sizes
from engine.execution.cuda.greenctx import GreenContexts, PartitionPair
from engine.execution.cuda.lanes import CudaLane, GraphStep, PageCopies
from engine.execution.cuda.piecewise import SIZES, PiecewiseGraphs
from engine.execution.executor import Lane, Split
from engine.execution.model_step import ModelStep
from engine.execution.sampling.sampler import Sampler
from engine.model.decoder import Decoder
from engine.ops.base import FixedBuffers, Ops

log = logging.getLogger(__name__)

DECODE_SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the SMs for decodes in the prepared splits. A few SMs suffice: decodes are bound by memory bandwidth, which
is not divided."""

_PREFILL_TOKENS, _MIXED_TOKENS = 4096, 512
"""Tokens of the step with which a lane for prefills, or for decodes, warms up."""


@dataclass(frozen=True, slots=True)
class CudaLanes:
    """Lanes and page copies of a runner.

    Attributes:
        contexts: Owner of the splits' streams.
    """

    full: Lane
    splits: Sequence[Split]
    copies: PageCopies
    contexts: GreenContexts | None


def make_lanes(
    model: Decoder,
    ops: Ops,
    sampler: Sampler,
    pool: torch.Tensor,
    *,
    max_model_len: int,
    max_decodes: int,
    split: bool,
    on_progress: Callable[[str, float], None],
) -> CudaLanes:
    """Makes the lanes, captures their graphs and warms them up.

    Args:
        model: Decoder with the ops `ops`.
        pool: [pages, layers, 2, Hkv, BS, D]. The last page is for padding and warm-up.
        max_model_len: Tokens of the longest sequence.
        max_decodes: Most decodes of a captured step; 0 captures none.
        split: True to partition the device, if possible.
        on_progress: Called with the current task and the fraction of it that is done.
    """
    device, spare_page = pool.device, len(pool) - 1
    kv = [pool[:, layer] for layer in range(pool.shape[1])]
    contexts, pairs = _partitions(device) if split else (None, [])
    prefill_ops = ops.with_own_workspaces()
    step = ModelStep(model, kv, sampler, device)
    prefill_step = ModelStep(model.with_ops(prefill_ops), kv, sampler, device)
    buffered = ops.with_fixed_buffers(SIZES[-1]) if max_decodes else None
    prefill_buffered = prefill_ops.with_fixed_buffers(SIZES[-1]) if max_decodes and pairs else None
    torch.cuda.synchronize(device)  # the default stream wrote weights, pool and buffers
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copies = PageCopies(pool, stream)
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefill-lane")
    captures = itertools.count(1)

    def captured() -> None:
        in_all = len(graph_sizes(max_decodes)) * (1 + len(pairs)) + len(SIZES) * (1 + 2 * len(pairs))
        on_progress("capturing graphs", next(captures) / in_all)

    def capture_decodes(lane: str, stream: torch.cuda.Stream) -> DecodeGraphs | None:
        with torch.cuda.stream(stream):
            ops_of_size = ops.capturable_decodes(max_decodes, blocks_for(max_model_len)) if max_decodes else None
        if ops_of_size is None:
            return None
        graphs = DecodeGraphs(
            model,
            ops_of_size,
            kv,
            spare_page=spare_page,
            max_decodes=max_decodes,
            stream=stream,
            device=device,
        )
        graphs.capture(lane, captured)
        return graphs

    def capture_prompts(
        lane: str, stream: torch.cuda.Stream, ops_in: tuple[Ops, FixedBuffers] | None
    ) -> PiecewiseGraphs | None:
        if ops_in is None:
            return None
        graphs = PiecewiseGraphs(
            model.with_ops(ops_in[0]), ops_in[1], kv, spare_page=spare_page, stream=stream, device=device
        )
        graphs.capture(lane, captured)
        return graphs

    def with_graphs(lane: str, stream: torch.cuda.Stream) -> ModelStep:
        return GraphStep(step, capture_decodes(lane, stream), capture_prompts(lane, stream, buffered))

    full = CudaLane(with_graphs("full", stream), stream, copies)
    splits: list[Split] = []
    for pair in pairs:
        sms = pair.prefill.sms + pair.decode.sms
        of_prefill, of_decode = pair.prefill.stream(), pair.decode.stream()
        prompts = capture_prompts(f"{pair.prefill.sms}-SM prefill", of_prefill, prefill_buffered)
        on_thread = CudaLane(GraphStep(prefill_step, None, prompts), of_prefill, copies, sleeps=True)
        prefill = ThreadLane(executor, on_thread.run, None, pair.prefill.sms / sms)
        decode_step = with_graphs(f"{pair.decode.sms}-SM decode", of_decode)
        splits.append(Split(prefill, CudaLane(decode_step, of_decode, copies, share=pair.decode.sms / sms)))
    # Captures free unused memory, so lanes warm up after them.
    for lane in (full, *(lanes.prefill for lanes in splits)):
        warm_up.run(lane, warm_up.prompts(_PREFILL_TOKENS, max_model_len, spare_page))
    for lanes in splits:
        warm_up.run(lanes.decode, warm_up.prompts(_MIXED_TOKENS, max_model_len, spare_page))
    return CudaLanes(full, splits, copies, contexts)


def _partitions(device: torch.device) -> tuple[GreenContexts | None, list[PartitionPair]]:
    try:
        contexts = GreenContexts(CudaDriver(), device.index or 0)
        try:
            return contexts, contexts.prepare(DECODE_SHARES)
        except CudaError:
            contexts.close()
            raise
    except (CudaUnavailableError, CudaError) as error:
        log.warning("no lanes, so prompts and decodes share batches: %s", error)
        return None, []
