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
from engine.execution.cuda.graphs import DecodeGraphs
from engine.execution.cuda.greenctx import GreenContexts, PartitionPair
from engine.execution.cuda.lanes import CudaLane, GraphStep, PageCopies
from engine.execution.executor import Lane, Split
from engine.execution.model_step import ModelStep
from engine.execution.sampling.sampler import Sampler
from engine.model.decoder import Decoder
from engine.ops.base import Ops

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
    step = ModelStep(model, kv, sampler, device)
    prefill_step = ModelStep(model.with_own_workspaces(), kv, sampler, device)
    contexts, pairs = _partitions(device) if split else (None, [])
    torch.cuda.synchronize(device)  # the default stream wrote weights and pool
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copies = PageCopies(pool, stream)
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefill-lane")
    captured = itertools.count(1)

    def with_graphs(lane: str, stream: torch.cuda.Stream) -> ModelStep:
        """Returns the step of a lane, with captured decodes if possible."""
        with torch.cuda.stream(stream):
            ops_of_size = ops.capturable_decodes(max_decodes, blocks_for(max_model_len)) if max_decodes else None
        if ops_of_size is None:
            return step
        graphs = DecodeGraphs(
            model,
            ops_of_size,
            kv,
            spare_page=spare_page,
            max_decodes=max_decodes,
            stream=stream,
            device=device,
        )
        total = len(graphs.sizes) * (1 + len(pairs))
        graphs.capture(lane, lambda: on_progress("capturing decode graphs", next(captured) / total))
        return GraphStep(step, graphs)

    full = CudaLane(with_graphs("full", stream), stream, copies)
    splits: list[Split] = []
    for pair in pairs:
        sms = pair.prefill.sms + pair.decode.sms
        on_thread = CudaLane(prefill_step, pair.prefill.stream(), copies, sleeps=True)
        prefill = ThreadLane(executor, on_thread.run, None, pair.prefill.sms / sms)
        stream_of_decodes = pair.decode.stream()
        decode_step = with_graphs(f"{pair.decode.sms}-SM decode", stream_of_decodes)
        splits.append(Split(prefill, CudaLane(decode_step, stream_of_decodes, copies, share=pair.decode.sms / sms)))
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
