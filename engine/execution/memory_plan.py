"""What the settings make of a checkpoint: its type, context length and page count, from the headers alone."""

import logging
import math
from dataclasses import dataclass, replace

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import CheckpointError, ConfigError
from engine.model.config import DTYPE_BYTES, Dtype, ModelConfig
from engine.model.weights import Checkpoint, expected_tensors

log = logging.getLogger(__name__)

_MIN_TOKENS = 64
"""A pool that cannot hold this many is of no use."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a checkpoint will be served.

    Attributes:
        config: With `max_model_len` as it is served with a pool that is large enough.
        tensors: Shape of every tensor that is read.
        dtype: Of weights and KV pool.
        weight_bytes: All weights in that type.
        page_bytes: Of one page of the KV pool.
    """

    config: ModelConfig
    tensors: dict[str, tuple[int, ...]]
    dtype: Dtype
    weight_bytes: int
    page_bytes: int

    def in_pool(self, kv_bytes: int) -> tuple[ModelConfig, int]:
        """The configuration as it is served with a KV pool of so many bytes, and how many pages that has.

        Raises:
            ConfigError: It is too small.
        """
        num_pages = _count_pages(kv_bytes, self.page_bytes)
        length, tokens = self.config.max_model_len, num_pages * BLOCK_SIZE
        if length > tokens:
            log.warning("the KV pool holds %d tokens: context cut from %d to that; see --kv-memory", tokens, length)
        return replace(self.config, max_model_len=min(length, tokens)), num_pages


def fit(config: ModelConfig, checkpoint: Checkpoint, *, dtype: str, max_model_len: int) -> Fit:
    """Checks a checkpoint against the settings. Reads no weights: a matter of milliseconds.

    Args:
        config: As read.
        checkpoint: The tensors of the same directory.
        dtype, max_model_len: As in `engine.execution.runner.TorchRunner`.

    Raises:
        CheckpointError: The directory cannot be served.
        ConfigError: The settings do not fit the checkpoint.
    """
    if "lm_head.weight" in checkpoint:  # then it counts, whatever config.json says: as in transformers
        config = replace(config, tie_embeddings=False)
    tensors = expected_tensors(config)
    checkpoint.check(tensors)
    resolved = _resolve_dtype(dtype, config, checkpoint)
    return Fit(
        config=replace(config, max_model_len=_resolve_length(max_model_len, config)),
        tensors=tensors,
        dtype=resolved,
        weight_bytes=DTYPE_BYTES[resolved] * sum(math.prod(shape) for shape in tensors.values()),
        page_bytes=config.page_bytes(resolved),
    )


def count_slots(host_bytes: int, page_bytes: int) -> int:
    """Pages that host memory of this size holds.

    Raises:
        ConfigError: It is none.
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


def _resolve_length(wanted: int, config: ModelConfig) -> int:
    limit = config.max_model_len
    if wanted > limit:
        raise ConfigError(f"--max-model-len {wanted} is over the checkpoint's limit of {limit} tokens")
    length = wanted or limit
    if config.sliding_window is not None and config.sliding_window < length:
        raise CheckpointError(
            f"the model uses sliding-window attention over {config.sliding_window} tokens, which is not supported; "
            f"only with --max-model-len {config.sliding_window} or less it can be served"
        )
    return length


def _count_pages(kv_bytes: int, page_bytes: int) -> int:
    pages = kv_bytes // page_bytes
    if pages * BLOCK_SIZE < _MIN_TOKENS:
        least = page_bytes * _MIN_TOKENS // BLOCK_SIZE
        raise ConfigError(f"--kv-memory {kv_bytes} is too small for this model; give at least {least} bytes")
    return pages
