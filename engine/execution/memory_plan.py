"""Plans the memory of a model from a checkpoint's headers and the settings: types, context length, pages."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import ConfigError
from engine.model.config import DTYPE_BYTES, Dtype, KvDtype, ModelConfig, Quantization
from engine.model.parameters import Parameter, expected_tensors, head_of, parameters
from engine.model.weights import Checkpoint
from engine.ops.quantized import GROUP, GroupFormat

log = logging.getLogger(__name__)

_MIN_TOKENS = 64
"""Tokens of the smallest useful pool."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a checkpoint will be served.

    Attributes:
        config: Configuration with the `max_model_len` that a large enough pool allows, and only those sliding windows
            that are shorter.
        tensors: Shape of every tensor that is read.
        dtype: Type of activations, and of weights that are not quantised.
        kv_dtype: Type of the KV pool.
        bits: Sizes of the elements of quantised weights; empty if there are none.
        weight_bytes: Size of all weights in memory.
        page_bytes: Size of one page of the KV pool.
    """

    config: ModelConfig
    tensors: dict[str, tuple[int, ...]]
    dtype: Dtype
    kv_dtype: KvDtype
    bits: frozenset[int]
    weight_bytes: int
    page_bytes: int

    def in_pool(self, kv_bytes: int) -> tuple[ModelConfig, int]:
        """Returns the configuration to serve with a KV pool of `kv_bytes`, and the pool's number of pages.

        Raises:
            ConfigError: The pool is too small.
        """
        num_pages = _count_pages(kv_bytes, self.page_bytes)
        length, tokens = self.config.max_model_len, num_pages * BLOCK_SIZE
        if length > tokens:
            log.warning("the KV pool holds %d tokens: context cut from %d to that; see --kv-memory", tokens, length)
        return replace(self.config, max_model_len=min(length, tokens)), num_pages

    @property
    def types(self) -> str:
        """Types of activations and weights, for people."""
        parts = [f"{' and '.join(f'int{bits}' for bits in sorted(self.bits))} weights"] if self.bits else []
        if self.kv_dtype != self.dtype:
            parts.append(f"{self.kv_dtype} KV pages")
        return f"{self.dtype} with {' and '.join(parts)}" if parts else self.dtype

    @property
    def needs_kernels(self) -> bool:
        """True if only the compiled CPU kernels compute this."""
        return bool(self.bits) or self.kv_dtype == "int8"

    def check_device(self, device: torch.device) -> None:
        """Raises ConfigError if the device does not compute quantised weights or pages."""
        if not self.needs_kernels:
            return
        if device.type != "cpu":
            other = "weights that are not quantised" if self.bits else "--kv-dtype auto"
            what = "weights" if self.bits else "KV pages"
            raise ConfigError(f"quantised {what} run on CPUs only; use --device cpu, or {other}")
        if self.dtype == "float16":
            raise ConfigError("quantised weights and KV pages are not computed in float16; use --dtype bfloat16")


def plan_memory(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    max_model_len: int,
    quantization: Quantization = "none",
    kv_dtype: Literal["auto", "int8"] = "auto",
) -> MemoryPlan:
    """Checks a checkpoint against the settings, in milliseconds: no weights are read.

    Args:
        config: As `load_config` returned it.
        checkpoint: Tensors of the same directory.
        dtype, max_model_len, quantization, kv_dtype: See `engine.execution.runner.TorchRunner`.

    Raises:
        CheckpointError: The directory cannot be served.
        ConfigError: The settings do not fit the checkpoint.
    """
    if "lm_head.weight" in checkpoint:  # wins over config.json, as in transformers
        config = replace(config, tie_embeddings=False)
    tensors = expected_tensors(config)
    checkpoint.check(tensors)
    weights = _resolve_dtype(dtype, config, checkpoint)
    sizes = list(_sizes(config, checkpoint, quantization))
    _check_groups(sizes)
    length = _resolve_length(max_model_len, config)
    in_pages: KvDtype = weights if kv_dtype == "auto" else kv_dtype
    return MemoryPlan(
        config=replace(config, max_model_len=length, windows=_effective_windows(config, length)),
        tensors=tensors,
        dtype=weights,
        kv_dtype=in_pages,
        bits=frozenset(form.bits for _, form in sizes if form is not None),
        weight_bytes=sum(_bytes_of(parameter, form, DTYPE_BYTES[weights]) for parameter, form in sizes),
        page_bytes=config.page_bytes(in_pages),
    )


def count_slots(host_bytes: int, page_bytes: int) -> int:
    """Counts the pages that fit into `host_bytes` of host memory.

    Raises:
        ConfigError: Not even one page fits.
    """
    if host_bytes < page_bytes:
        raise ConfigError(f"--host-kv-memory {host_bytes} holds no page; give at least {page_bytes} bytes")
    return host_bytes // page_bytes


def _resolve_dtype(name: str, config: ModelConfig, checkpoint: Checkpoint) -> Dtype:
    if name == "auto":
        return config.dtype or checkpoint.dtype
    for dtype in DTYPE_BYTES:
        if name == dtype:
            return dtype
    raise ConfigError(f"dtype {name} is not known; use auto, {', '.join(DTYPE_BYTES)}")


def _sizes(
    config: ModelConfig, checkpoint: Checkpoint, quantization: Quantization
) -> Iterator[tuple[Parameter, GroupFormat | None]]:
    """Yields the parameters of each layer and expert, with the format of their weights if those are quantised.

    Raises:
        ConfigError: Quantised weights are to be quantised, or experts of one layer differ.
    """
    for parameter in parameters(config):
        for layer in [None] if parameter.layers is None else parameter.layers:
            experts = [parameter.tensors("weight", layer, expert) for expert in range(parameter.experts or 1)]
            formats = [_format_of(parameter, names, checkpoint, quantization) for names in experts]
            if len(set(formats)) > 1:
                raise ConfigError(f"the experts of layer {layer} are quantised in different ways ({experts[0][0]})")
            yield from ((parameter, form) for form in formats)
    if config.tie_embeddings:  # a quantised head is a copy of the embedding, which is not
        head = head_of(config)
        form = _format_of(head, head.tensors("weight"), checkpoint, quantization)
        if form is not None:
            yield head, form


def _format_of(
    parameter: Parameter, names: list[str], checkpoint: Checkpoint, quantization: Quantization
) -> GroupFormat | None:
    stored = checkpoint.group_format(names) if parameter.can_be_quantized else None
    if stored is not None and quantization != "none":
        raise ConfigError(
            f"the weights are quantised already ({names[0]} has {stored.bits} bits); use --quantization none"
        )
    bits = parameter.bits(quantization)
    return GroupFormat(bits) if bits is not None else stored


def _bytes_of(parameter: Parameter, form: GroupFormat | None, element_bytes: int) -> int:
    rows = sum(parameter.parts.values())
    elements = rows * (1 if parameter.columns is None else parameter.columns)
    weight = elements * element_bytes if form is None else form.num_bytes(elements)
    return weight + (rows * element_bytes if parameter.bias else 0)


def _check_groups(sizes: list[tuple[Parameter, GroupFormat | None]]) -> None:
    for parameter, form in sizes:
        if form is not None and parameter.columns is not None and parameter.columns % GROUP:
            raise ConfigError(
                f"quantised weights have groups of {GROUP} columns, which do not divide the {parameter.columns} of "
                f"{next(iter(parameter.parts))}; use weights that are not quantised"
            )


def _resolve_length(wanted: int, config: ModelConfig) -> int:
    limit = config.max_model_len
    if wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} is over the checkpoint's limit of {limit} tokens")
    return wanted or limit


def _effective_windows(config: ModelConfig, length: int) -> tuple[int | None, ...]:
    return tuple(None if window is None or window >= length else window for window in config.windows)


def _count_pages(kv_bytes: int, page_bytes: int) -> int:
    pages = kv_bytes // page_bytes
    if pages * BLOCK_SIZE < _MIN_TOKENS:
        least = page_bytes * _MIN_TOKENS // BLOCK_SIZE
        raise ConfigError(f"--kv-memory {kv_bytes} is too small for this model; give at least {least} bytes")
    return pages
