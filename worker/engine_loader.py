"""Loads a checkpoint and builds the engine."""

import json
import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cpd.common.errors import ConfigError
from cpd.common.settings import NO_SHARED_GPU, WorkerSettings
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile
from engine.engine import Engine
from engine.execution.cpu.lanes import core_quota, own_cores, use_threads
from engine.execution.memory_limits import default_pool
from engine.execution.memory_plan import plan_memory
from engine.execution.runner import TorchRunner
from engine.execution.torch_device import explain_gpu_errors, resolve_device
from engine.model.checkpoint import open_checkpoint
from engine.model.config import load_config
from engine.model.fingerprint import model_fingerprint
from engine.profile.labels import profile_labels
from engine.profile.rough import measure_rough_profile
from kvtransfer.base import PoolMemory
from worker.context import ExpectedMemory, LoadedEngine
from worker.wire_format import Limits

log = logging.getLogger(__name__)

_ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@explain_gpu_errors()
def load_engine(settings: WorkerSettings) -> LoadedEngine:
    """Loads the model. Call it on the thread that will run the engine.

    Raises:
        CheckpointError, ConfigError: The model can't be served with these settings.
    """
    directory = _directory(settings)
    use_threads(own_cores())
    runner = TorchRunner(
        directory,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        kv_bytes=settings.kv_memory,
        gpu_memory=settings.gpu_memory,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        lanes=settings.colocate != "mixed",
        on_progress=_log_progress(),
    )
    if runner.pool.is_cuda and any(
        "expandable_segments:true" in os.environ.get(name, "").lower() for name in _ALLOCATOR_SETTINGS
    ):
        log.warning(
            "pages can't go directly from GPU to GPU: remove expandable_segments from %s",
            " or ".join(_ALLOCATOR_SETTINGS),
        )
    if not runner.pool.is_cuda and (quota := core_quota()) is not None and quota < own_cores():
        log.warning(
            "threads on %d cores share a CPU quota of %g cores and all stop when it is used up. Give the "
            "container whole cores instead (docker run --cpuset-cpus; in Kubernetes whole CPUs and the static CPU "
            "manager policy)",
            own_cores(),
            quota,
        )
    here = profile_labels(Path(settings.model), runner.dtype, runner.pool.device)
    profile = _profile(settings, runner, here)
    colocation = _colocation(settings, runner, profile)
    runner.warm_up(colocation.max_tokens)
    host_bytes = int(settings.host_kv_memory)
    engine = Engine(
        runner,
        max_model_len=runner.config.max_model_len,
        colocation=colocation,
        max_num_seqs=settings.max_num_seqs,
        max_queue_tokens=settings.max_queue_tokens,
        max_wait_s=settings.max_wait_s,
        host=runner.host_memory(host_bytes, checksums=settings.kv_checksum) if host_bytes else None,
        window=runner.config.longest_window or 0,
    )
    return LoadedEngine(
        engine=engine,
        memory=PoolMemory(runner.pool.data_ptr(), runner.num_pages, runner.page_bytes, runner.pool.device.index),
        page_bytes=runner.page_bytes,
        limits=Limits(vocab_size=runner.config.vocab_size, max_model_len=engine.max_model_len),
        fingerprint=runner.fingerprint,
        dtype=runner.dtype,
        device=f"{here['device']}, kernels of {runner.kernels}",
        profile=profile,
        token_budget=settings.token_budget,
        progress=runner.progress,
        grammars_of=directory if (directory / "tokenizer.json").exists() else None,
        model_memory=runner.model_memory() if settings.device_memory is not None else None,
    )


def expected_memory(settings: WorkerSettings) -> ExpectedMemory:
    """Returns what the model will take on a device that it shares. Reads no weights.

    Raises:
        CheckpointError, ConfigError: The model can't be served with these settings, or not on a shared device.
    """
    directory = _directory(settings)
    device = resolve_device(settings.device)
    if device.type == "cuda":
        raise ConfigError(NO_SHARED_GPU)
    config = load_config(directory)
    with open_checkpoint(directory, config) as checkpoint:
        plan = plan_memory(
            config,
            checkpoint,
            dtype=settings.dtype,
            quantization=settings.quantization,
            kv_dtype=settings.kv_dtype,
            max_model_len=settings.max_model_len,
        )
    pool = settings.kv_memory
    pool_bytes = default_pool(device, plan.weight_bytes, plan.page_bytes, 1.0) if pool is None else int(pool)
    weights = model_fingerprint(directory, config, plan.dtype, plan.kv_dtype, settings.quantization).hex()
    names = ("max_model_len", "max_num_seqs", "token_budget", "colocate")
    essentials = json.dumps([weights, pool_bytes, *(getattr(settings, name) for name in names)])
    return ExpectedMemory(plan.weight_bytes + pool_bytes, blake2b(essentials.encode(), digest_size=16).hexdigest())


def _directory(settings: WorkerSettings) -> Path:
    directory = Path(settings.model)
    if not settings.model or not directory.is_dir():
        raise ConfigError(f"--model must name a checkpoint directory; {settings.model!r} is not one")
    return directory


def _profile(settings: WorkerSettings, runner: TorchRunner, here: dict[str, Any]) -> Profile:
    """Returns the profile that the settings name, or measures a rough one.

    Args:
        here: The labels of a profile measured here.
    """
    if not settings.profile:
        return measure_rough_profile(runner, runner.config.max_model_len, **here)
    profile = Profile.load(settings.profile)
    for what in ("model", "device", "units"):
        if (measured := getattr(profile, what)) != here[what]:
            log.warning("%s was measured with %s %s, not %s", settings.profile, what, measured, here[what])
    return profile


def _colocation(settings: WorkerSettings, runner: TorchRunner, profile: Profile) -> Colocation:
    """Returns the colocation rule of the settings, limited by the device's splits."""
    if settings.colocate == "lanes" and not runner.splits:
        log.warning("this device can't be split: prefills and decodes share batches (--colocate mixed)")
    return Colocation(
        PerfModel(profile),
        token_budget=settings.token_budget,
        mode=settings.colocate,
        splits=[split.shares for split in runner.splits],
        itl_ms=settings.slo_itl,
    )


def _log_progress() -> Callable[[str, float], None]:
    """Returns a function that logs each tenth of an operation's progress."""
    logged: dict[str, int] = {}

    def progress(what: str, fraction: float) -> None:
        tenths = int(fraction * 10)
        if tenths > logged.get(what, -1):
            logged[what] = tenths
            log.info("%s: %d %%", what, round(fraction * 100))

    return progress
