"""The lanes of a GPU, ready to serve: partitions, streams, captured graphs, kernels compiled and memory taken."""

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
from engine.execution.cuda.lanes import CudaLane, GraphSteps, PageCopies
from engine.execution.executor import Lane, Split
from engine.execution.model_step import Steps
from engine.execution.sampling.sampler import Sampler
from engine.model.decoder import Decoder
from engine.ops.base import Ops
from engine.ops.flashinfer_ops import FlashInferOps

log = logging.getLogger(__name__)

DECODE_SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Of the SMs, in the prepared splits. Decodes are bound by memory, which is not divided: a few SMs use most of it."""

_CHUNK, _RIDING = 4096, 512
"""Tokens of a long chunk, and of prompts that ride along with decodes. Each lane computes a step of that length before
it serves: kernels are compiled, and memory for activations is taken, while nobody waits."""


@dataclass(frozen=True, slots=True)
class CudaLanes:
    """What a runner keeps.

    Attributes:
        contexts: Owns the splits' streams.
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
    most_decodes: int,
    split: bool,
    on_progress: Callable[[str, float], None],
) -> CudaLanes:
    """Makes the lanes, tries each of them and captures their graphs.

    Args:
        model: Its ops are `ops`.
        pool: [pages, layers, 2, Hkv, BS, D]. The last page is for padding and warming up.
        max_model_len: Tokens of the longest sequence.
        most_decodes: Sequences of a step that runs as a captured graph; 0: none does.
        split: Whether to divide the device, if that is possible.
        on_progress: Told what is going on and the fraction done.
    """
    device, spare_page = pool.device, len(pool) - 1
    kv = [pool[:, layer] for layer in range(pool.shape[1])]
    steps, aside = Steps(model, kv, sampler, device), Steps(model.beside(), kv, sampler, device)
    contexts, pairs = _partitions(device) if split else (None, [])
    torch.cuda.synchronize(device)  # weights and pool were written on the default stream
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copies = PageCopies(pool, stream)
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefill-lane")
    captured = itertools.count(1)

    def with_graphs(lane: str, stream: torch.cuda.Stream) -> Steps:
        """The steps, the decodes among them as graphs where that is possible."""
        if not isinstance(ops, FlashInferOps) or not most_decodes:
            return steps
        graphs = DecodeGraphs(
            model,
            ops,
            kv,
            spare_page=spare_page,
            most_decodes=most_decodes,
            most_pages=blocks_for(max_model_len),
            stream=stream,
            device=device,
        )
        total = len(graphs.sizes) * (1 + len(pairs))
        graphs.capture(lane, lambda: on_progress("capturing decode graphs", next(captured) / total))
        return GraphSteps(steps, graphs)

    full = CudaLane(with_graphs("full", stream), stream, copies)
    splits: list[Split] = []
    for pair in pairs:
        sms = pair.prefill.sms + pair.decode.sms
        sleeper = CudaLane(aside, pair.prefill.stream(), copies, sleeps=True)
        prefill = ThreadLane(executor, sleeper.run, None, pair.prefill.sms / sms)
        beside = pair.decode.stream()
        decodes = with_graphs(f"{pair.decode.sms}-SM decode", beside)
        splits.append(Split(prefill, CudaLane(decodes, beside, copies, share=pair.decode.sms / sms)))
    for lane in (full, *(lanes.prefill for lanes in splits)):  # after the captures, which give unused memory back
        warm_up.run(lane, warm_up.prompts(_CHUNK, max_model_len, spare_page))
    for lanes in splits:
        warm_up.run(lanes.decode, warm_up.prompts(_RIDING, max_model_len, spare_page))
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
        log.warning("prompts and decodes share batches, since there are no lanes: %s", error)
        return None, []
