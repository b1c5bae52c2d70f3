"""Checkpoint in, engine out."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpd.common.config import Role, WorkerSettings
from cpd.common.errors import ConfigError
from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile
from engine.engine import Engine
from engine.execution.cpu.lanes import core_quota, own_cores, use_threads
from engine.execution.device import gpu_errors_said
from engine.execution.runner import TorchRunner
from engine.profile.about import about
from engine.profile.rough import time_a_few_steps
from kvtransfer.base import PoolMemory
from worker.convert import Limits
from worker.node import Loaded

log = logging.getLogger(__name__)

_TORCHS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@gpu_errors_said()
def load_engine(settings: WorkerSettings, role: Role) -> Loaded:
    """Loads the model. To be called on the thread that will run the engine.

    Raises:
        CheckpointError, ConfigError: The model can't be served with these settings.
    """
    directory = Path(settings.model)
    if not settings.model or not directory.is_dir():
        raise ConfigError(f"--model must name a checkpoint directory; {settings.model!r} is none")
    use_threads(own_cores())
    runner = TorchRunner(
        directory,
        dtype=settings.dtype,
        device=settings.device,
        kv_bytes=settings.kv_memory,
        gpu_memory=settings.gpu_memory,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        graphs=role == "combined",  # a prefill worker's steps of single tokens are few
        lanes=settings.colocate != "mixed",
        on_progress=_log_progress(),
    )
    if runner.pool.is_cuda and any("expandable_segments:true" in os.environ.get(name, "").lower() for name in _TORCHS):
        log.warning("pages can't go straight from GPU to GPU: take expandable_segments out of %s", " or ".join(_TORCHS))
    if not runner.pool.is_cuda and (quota := core_quota()) is not None and quota < own_cores():
        log.warning(
            "threads on %d cores share the time of %g: all stand still when it is used up. Give the container cores "
            "instead (docker run --cpuset-cpus; in Kubernetes whole CPUs and the static CPU manager policy)",
            own_cores(),
            quota,
        )
    here = about(Path(settings.model), runner.dtype, runner.pool.device)
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
        host=runner.host_memory(host_bytes, checksums=settings.kv_checksum) if host_bytes else None,
    )
    return Loaded(
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
    )


def _profile(settings: WorkerSettings, runner: TorchRunner, here: dict[str, Any]) -> Profile:
    """The profile that the settings name, or a rough one.

    Args:
        here: What a profile that is measured here says of itself.
    """
    if settings.profile is None:
        return time_a_few_steps(runner, runner.config.max_model_len, **here)
    profile = Profile.load(settings.profile)
    for what in ("model", "device", "units"):
        if (measured := getattr(profile, what)) != here[what]:
            log.warning("%s was measured with %s %s, not %s", settings.profile, what, measured, here[what])
    return profile


def _colocation(settings: WorkerSettings, runner: TorchRunner, profile: Profile) -> Colocation:
    """The rule that the settings ask for, as far as the device can be split."""
    if settings.colocate == "lanes" and not runner.splits:
        log.warning("this device can't be split: prompts and decodes share batches (--colocate mixed)")
    return Colocation(
        PerfModel(profile),
        token_budget=settings.token_budget,
        mode=settings.colocate,
        splits=[split.shares for split in runner.splits],
        itl_ms=settings.slo_itl,
    )


def _log_progress() -> Callable[[str, float], None]:
    """Logs each tenth of the way, of each thing that is going on."""
    logged: dict[str, int] = {}

    def progress(what: str, fraction: float) -> None:
        tenths = int(fraction * 10)
        if tenths > logged.get(what, -1):
            logged[what] = tenths
            log.info("%s: %d %%", what, round(fraction * 100))

    return progress
