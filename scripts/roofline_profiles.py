"""Writes the bundled profiles of an H200, computed from data sheets and the models' shapes.

    python scripts/roofline_profiles.py

They are for simulations and no evidence of real hardware ("source": "roofline"): every kernel is assumed to reach its
roofline, and the interference of two lanes is one assumed factor. Each number below names its source.
"""

from dataclasses import dataclass

from cpd.common.blocks import BLOCK_SIZE
from cpd.performance.model import Profile, ShareProfile, StepCost, TransferProfile
from cpd.performance.profiles import PROFILES

# NVIDIA H200 SXM. Data sheet: 4.8 TB/s, 989 TFLOP/s dense in bf16, 141 GB, 132 SMs; shares that good kernels reach:
BANDWIDTH = 4.3e12
"""Bytes per second, 90 % of the peak."""
MATMUL_FLOPS = 790e12
"""Large bf16 GEMMs, 80 % of the peak."""
ATTENTION_FLOPS = 550e12
"""FlashAttention-3 forward, causal, head size 128, on the same chip: 550 to 650 TFLOP/s (arXiv:2407.08608, fig. 5)."""
SMS = 132
SM_STEP = 8
"""Green Contexts on compute capability 9.0 come in multiples of 8 SMs."""
SATURATING_SMS = 56
"""SMs that saturate the memory bandwidth; fewer get a proportional share. By Little's law an SM with 64 KiB of loads in
flight at 850 ns latency reads 77 GB/s, a 56th of 4.3 TB/s. An assumption, see SLOWDOWN."""
SLOWDOWN = 1.06
"""Slowdown of either lane beside the other, because they share L2 and memory. An assumption that, with SATURATING_SMS,
agrees with a published figure: a compute-bound and a memory-bound kernel of equal length on disjoint SMs finish 1.34
times sooner than one after the other on an H200. Here 56 / n = 132 / (132 - n) at n = 39: 2 / (1.42 * 1.06) = 1.33."""
MEMORY_BYTES = 141e9
MEMORY_USED = 0.9
ACTIVATION_BYTES = 6e9
"""Memory for activations of the largest step, workspaces and CUDA graphs."""

GRAPH_STEP_MS = 0.3
"""Overhead of a replayed decode graph: about 300 kernels, a microsecond between two."""
EAGER_STEP_MS = 1.0
"""Overhead of a step launched kernel by kernel: the chip drains and fills between two, 3 microseconds each."""
LINK_BYTES_PER_MS = 45e6
"""RDMA at 400 Gb/s: 50 GB/s, less a tenth."""
LINK_FIXED_MS = 0.2
"""Time to post the writes of a chunk's pages, and for the message that they have arrived."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model that determine the time of steps (bf16)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def layer_params(self) -> int:
        """Number of weights of the linear layers, without the LM head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        """Number of weights of the LM head. It reads them once per step, and computes sampled rows only."""
        return self.hidden * self.vocab

    @property
    def kv_token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def pair_flops(self) -> int:
        """Operations per (query, key) pair: two products of `head_dim` in each head."""
        return 4 * self.layers * self.heads * self.head_dim


SHAPES = {
    "Qwen3-8B": Shape(4096, 36, 32, 8, 128, 12288, 151_936),
    "Qwen3-4B": Shape(2560, 36, 32, 8, 128, 9728, 151_936),
    "Llama-3-8B": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
}


def step_cost(shape: Shape, sms: int, *, prefill: bool) -> StepCost:
    """Cost of steps on a share of the device: the larger of reading the weights and of arithmetic, plus overheads."""
    bytes_per_ms = BANDWIDTH / 1e3 * min(1.0, sms / SATURATING_SMS)
    flops_per_ms = MATMUL_FLOPS / 1e3 * sms / SMS
    token_ms = 2 * shape.layer_params / flops_per_ms
    flat_ms = 2 * (shape.layer_params + shape.head_params) / bytes_per_ms
    fixed_ms = EAGER_STEP_MS if prefill else GRAPH_STEP_MS
    bend = max(2, round(flat_ms / token_ms))
    knots = (1, bend, 2 * bend)
    return StepCost(
        tokens=knots,
        tokens_ms=tuple(_rounded(fixed_ms + max(flat_ms, tokens * token_ms)) for tokens in knots),
        # Logits of one sequence: the LM head's arithmetic, and about four passes over them in float32 to sample.
        seq_ms=_rounded(2 * shape.head_params / flops_per_ms + 4 * 4 * shape.vocab / bytes_per_ms),
        context_ms=_rounded(shape.kv_token_bytes / bytes_per_ms),
        pair_ms=_rounded(shape.pair_flops / (ATTENTION_FLOPS / 1e3 * sms / SMS)) if prefill else 0.0,
        slowdown=SLOWDOWN,
    )


def profile(model: str, shape: Shape) -> Profile:
    """The profile with all shares of the device that a split can have."""
    parts = {size for k in range(SM_STEP, SMS, SM_STEP) for size in (k, SMS - k)}
    weight_bytes = 2 * (shape.layer_params + 2 * shape.head_params)
    page_bytes = BLOCK_SIZE * shape.kv_token_bytes
    return Profile(
        schema="cpd-profile/1",
        source="roofline",
        device="NVIDIA H200",
        model=f"{model} bf16",
        units=SMS,
        unit_step=SM_STEP,
        shares=tuple(
            ShareProfile(
                share=sms / SMS,
                decode=step_cost(shape, sms, prefill=False),
                prefill=step_cost(shape, sms, prefill=True),
            )
            for sms in sorted({*parts, SMS})
            if sms >= SM_STEP
        ),
        transfer=TransferProfile(fixed_ms=LINK_FIXED_MS, bytes_per_ms=LINK_BYTES_PER_MS),
        page_bytes=page_bytes,
        num_pages=int((MEMORY_USED * MEMORY_BYTES - weight_bytes - ACTIVATION_BYTES) // page_bytes),
    )


def file_of(model: str) -> str:
    """File name of a model's profile."""
    return f"h200-{model.lower().replace('llama-3', 'llama3')}.json"


def _rounded(ms: float) -> float:
    return float(f"{ms:.5g}")


def main() -> None:
    """Writes all profiles."""
    for model, shape in SHAPES.items():
        path = PROFILES / file_of(model)
        profile(model, shape).save(path)
        print(f"{path.name}: {shape.layer_params / 1e9:.2f} G parameters in layers")


if __name__ == "__main__":
    main()
