"""Is FlashInfer's fa2 correct on the strided page layout, and what does the layout cost?

A page of the pool holds one block of all layers, so a layer is the strided view `pool[:, layer]`:
[pages, 2, Hkv, block, D], "HND" to FlashInfer. The same numbers are laid out in three ways:

- strided: that view; its pages are one pool page (2 to 2.25 MiB) apart
- HND: every layer is a contiguous tensor
- NHD: the same with [pages, 2, block, Hkv, D], FlashInfer's default

Results are checked against float64 on ragged lengths, with outputs filled with NaN before. The pages are scattered over
a pool of more than 2³² elements, which reveals offsets computed in 32 bits. Timed runs use another layer each time, so
that they find nothing in the L2 cache.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from cpd.common.blocks import BLOCK_SIZE
from engine.model.config import ModelConfig
from scripts.gpu.common import measure_ms, relative_error, require
from scripts.gpu.models import MODELS, Lens, attention_flop, kv_bytes, model_config, random_pages
from scripts.gpu.results import Report, Target

WORKSPACE_BYTES = 128 << 20
LAYOUTS = ("strided", "HND", "NHD")
MAX_ERROR = Target(at_most=1e-2)
"""Relative error of bfloat16 against float64."""
MAX_COST = Target(at_most=1.05)
"""Above this the layout should be reconsidered."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step. Decodes use FlashInfer's decode wrapper on tensor cores, other steps its prefill wrapper."""

    name: str
    lens: Lens

    @property
    def decode(self) -> bool:
        return all(count == 1 for count, _ in self.lens)


RAGGED = [
    Case("decode, ragged", [(1, context) for context in (1, 15, 16, 17, 100, 1000, 4097)]),
    Case("prefill, ragged", [(1, 1), (5, 5), (16, 48), (17, 33), (130, 1130), (700, 700)]),
]
TIMED = [
    Case("decode 1 x 1,024", [(1, 1024)]),
    Case("decode 64 x 1,024", [(1, 1024)] * 64),
    Case("decode 128 x 1,024", [(1, 1024)] * 128),
    Case("decode 16 x 8,192", [(1, 8192)] * 16),
    Case("prefill 2,048", [(2048, 2048)]),
    Case("prefill 2,048 after 6,144", [(2048, 8192)]),
    Case("prefill 8,192", [(8192, 8192)]),
]
POOL_PAGES = 8448
"""Holds 128 sequences of 1,024 tokens; more than 2³² elements in every shape used here."""


class Pools:
    """One set of random keys and values in three layouts."""

    def __init__(self, config: ModelConfig, num_pages: int) -> None:
        self.num_pages = num_pages
        self._pool = torch.empty(
            num_pages, *config.page_shape("bfloat16"), dtype=torch.bfloat16, device="cuda"
        ).normal_()
        self._separate = {
            "HND": [layer.contiguous() for layer in self._pool.unbind(1)],
            "NHD": [layer.transpose(2, 3).contiguous() for layer in self._pool.unbind(1)],
        }

    def layer(self, layout: str, index: int) -> torch.Tensor:
        """Keys and values of a layer: [pages, 2, Hkv, block, D]; with NHD [pages, 2, block, Hkv, D]."""
        return self._pool[:, index] if layout == "strided" else self._separate[layout][index]


class Attention:
    """A planned FlashInfer call over one layout."""

    def __init__(
        self, flashinfer: Any, config: ModelConfig, case: Case, pages: Sequence[Sequence[int]], layout: str
    ) -> None:
        kv_layout = "NHD" if layout == "NHD" else "HND"
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        counts = [count for count, _ in case.lens]
        self._out = torch.empty(sum(counts), config.num_heads, config.head_dim, dtype=torch.bfloat16, device="cuda")
        indptr = torch.tensor(np.cumsum([0, *map(len, pages)]), dtype=torch.int32)
        indices = torch.tensor([page for row in pages for page in row], dtype=torch.int32, device="cuda")
        last = torch.tensor([(context - 1) % BLOCK_SIZE + 1 for _, context in case.lens], dtype=torch.int32)
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        if case.decode:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, kv_layout, use_tensor_cores=True, backend="fa2"
            )
            plan = partial(wrapper.plan, indptr, indices, last, *shape, **dtypes)
        else:
            queries = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout, backend="fa2")
            plan = partial(wrapper.plan, queries, indptr, indices, last, *shape, causal=True, **dtypes)
        plan()  # compiles or loads the kernels
        torch.cuda.synchronize()
        started = time.perf_counter()
        plan()
        torch.cuda.synchronize()
        self.plan_ms = (time.perf_counter() - started) * 1e3
        self._run = wrapper.run

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Attention of `q` [T, Hq, D]: [T, Hq, D], which the next call overwrites."""
        self._run(q, kv, out=self._out, enable_pdl=False)  # as the engine
        return self._out

    def run_layer(self, q: torch.Tensor, layers: Sequence[torch.Tensor], index: int) -> None:
        """Runs over `layers[index]`."""
        self(q, layers[index])

    def checked(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Like a call, but returns a copy in which elements that were not written are NaN."""
        self._out.fill_(float("nan"))
        return self(q, kv).clone()


def reference(q: torch.Tensor, kv: torch.Tensor, case: Case, pages: Sequence[Sequence[int]]) -> torch.Tensor:
    """Causal attention in float64, one sequence and one key-value head at a time.

    Args:
        q: [T, Hq, D]
        kv: [pages, 2, Hkv, block, D]

    Returns:
        [T, Hq, D] float64
    """
    heads, dim = q.shape[1:]
    group = heads // kv.shape[2]
    out = torch.empty_like(q, dtype=torch.float64)
    begin = 0
    for (count, context), row in zip(case.lens, pages, strict=True):
        rows = kv[torch.tensor(row, device=kv.device)]  # [blocks, 2, Hkv, block, D]
        k, v = rows.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context].double()  # [Hkv, context, D]
        future = torch.ones(count, context, dtype=torch.bool, device=kv.device).triu(context - count + 1)
        for head in range(kv.shape[2]):
            mine = slice(head * group, (head + 1) * group)
            queries = q[begin : begin + count, mine].double().transpose(0, 1)  # [group, count, D]
            scores = queries @ k[head].T / dim**0.5
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            out[begin : begin + count, mine] = (weights @ v[head]).transpose(0, 1)
        begin += count
    return out


def worst_error(flashinfer: Any, config: ModelConfig, pools: Pools, layout: str) -> float:
    """Worst error of ragged steps in the first and last layer against float64; NaN if an element was not written."""
    rng = np.random.default_rng(1)
    errors = []
    for case in RAGGED:
        pages = random_pages(case.lens, pools.num_pages, rng)
        attention = Attention(flashinfer, config, case, pages, layout)
        for layer in (0, config.num_layers - 1):
            q = _queries(config, case)
            wanted = reference(q, pools.layer("HND", layer), case, pages)
            errors.append(relative_error(attention.checked(q, pools.layer(layout, layer)), wanted))
    return float(np.max(errors))  # unlike max, it keeps NaN


def time_case(report: Report, flashinfer: Any, name: str, config: ModelConfig, pools: Pools, case: Case) -> bool:
    """Times a step in every layout. Returns True if the strided result equals the contiguous one bit for bit."""
    pages = random_pages(case.lens, pools.num_pages, np.random.default_rng(2))
    q = _queries(config, case)
    layers = config.num_layers
    if case.decode:
        floor = report.ceilings.bytes_ms(sum(context for _, context in case.lens) * kv_bytes(config) / layers)
    else:
        floor = report.ceilings.flop_ms(attention_flop(config, case.lens) / layers)
    medians: dict[str, float] = {}
    outputs: dict[str, torch.Tensor] = {}
    for layout in LAYOUTS:
        attention = Attention(flashinfer, config, case, pages, layout)
        outputs[layout] = attention.checked(q, pools.layer(layout, 0))
        run_layer = partial(attention.run_layer, q, [pools.layer(layout, index) for index in range(layers)])
        timing = measure_ms(run_layer, sets=layers, repeats=2 * layers, queued=True)
        medians[layout] = timing.median
        note = f"80 % within {timing.low:.4g} to {timing.high:.4g}; plan {attention.plan_ms:.2g} ms"
        report.add(f"{name}: {case.name}, {layout}", timing.median, "ms a layer", floor=floor, note=note)
    for other in ("HND", "NHD"):
        ratio = medians["strided"] / medians[other]
        report.add(f"{name}: {case.name}: strided / {other}", ratio, "ratio", target=MAX_COST)
    return torch.equal(outputs["strided"], outputs["HND"])


def _queries(config: ModelConfig, case: Case) -> torch.Tensor:
    tokens = sum(count for count, _ in case.lens)
    return torch.randn(tokens, config.num_heads, config.head_dim, dtype=torch.bfloat16, device="cuda")


def run(report: Report) -> None:
    """Runs the experiment."""
    flashinfer = require("flashinfer", "flashinfer-python")
    for name in ("Qwen3-8B", "Llama-3-8B"):
        config = model_config(MODELS[name])
        pools = Pools(config, POOL_PAGES)
        for layout in LAYOUTS:
            error = worst_error(flashinfer, config, pools, layout)
            report.add(f"{name}: {layout}: worst error", error, "relative", target=MAX_ERROR)
        same = [time_case(report, flashinfer, name, config, pools, case) for case in TIMED]
        report.add(f"{name}: strided equals HND in every step", float(all(same)), "0 or 1", target=Target(at_least=1))
        del pools
        torch.cuda.empty_cache()
