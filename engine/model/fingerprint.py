"""Digests a model, so that workers know whose pages they can use."""

import contextlib
import json
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from cpd.common.blocks import BLOCK_SIZE
from engine.model.checkpoint import open_checkpoint
from engine.model.config import Dtype, KvDtype, ModelConfig, Quantization

_WHOLE_BYTES = 64 << 10
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def model_fingerprint(
    model_dir: Path, config: ModelConfig, dtype: Dtype, kv_dtype: KvDtype, quantization: Quantization = "none"
) -> bytes:
    """Digests everything that a KV page's content depends on. Workers with equal digests can exchange pages.

    The digest (16 bytes) covers the model's shape, the types of weights and pages, the block size, and each tensor's
    name, type, shape and samples of its bytes, so that two fine-tunes of one model differ. Sharding makes no
    difference.

    Args:
        config: With only those sliding windows that are in effect.
    """
    essentials = asdict(config)
    del essentials["max_model_len"], essentials["dtype"], essentials["scheme"]
    # Models without experts, windows and quantisation keep the digest that releases before these fields gave them.
    if config.experts is None:
        del essentials["experts"]
    if not config.has_windows:
        del essentials["windows"]
    if quantization != "none":
        essentials["quantization"] = quantization
    digest = blake2b(json.dumps([essentials, dtype, kv_dtype, BLOCK_SIZE], sort_keys=True).encode(), digest_size=16)
    with open_checkpoint(model_dir, config) as checkpoint, contextlib.ExitStack() as stack:
        files = {}
        for name, entry in checkpoint.entries():
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            if entry.path not in files:
                files[entry.path] = stack.enter_context(entry.path.open("rb"))
            size = entry.end - entry.begin
            if size <= _WHOLE_BYTES:
                spans = [(0, size)]
            else:
                last = size - _SAMPLE_BYTES
                spans = [(last * i // (_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_SAMPLES)]
            for offset, length in spans:
                files[entry.path].seek(entry.begin + offset)
                digest.update(files[entry.path].read(length))
    return digest.digest()
