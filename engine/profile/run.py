"""What `cpd profile` does: loads a model as a worker does, measures it, and fits the performance model."""

import os
import platform
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpd.config import ModelSettings
from cpd.errors import ConfigError
from cpd.perffit import Sample, fit_profile
from cpd.perfmodel import Profile
from engine.batch import Runner
from engine.profile.budget import BudgetSweep, sweep_budget
from engine.profile.measure import Limits, Progress, decode_series, measure, mixed_series, prefill_series
from engine.profile.settings import BudgetSettings, ProfileSettings
from engine.profile.steps import Step, StepTimer
from engine.runner import TorchRunner

QUICK_S, THOROUGH_S = 60.0, 240.0
BUDGET_S = 60.0

SM_STEP = 8
"""Partitions of a GPU of compute capability 9.0 have a multiple of so many SMs."""


def run_profile(settings: ProfileSettings, model_dir: Path, on_progress: Progress) -> tuple[Profile, list[Sample]]:
    """Measures a model on this device.

    Args:
        settings: What to measure. Nothing is written.
        model_dir: The checkpoint.

    Returns:
        The profile, and what it was fitted to.

    Raises:
        CheckpointError, ConfigError: The model can't be run here.
    """
    runner = _load(settings, model_dir, on_progress)
    seconds = QUICK_S if settings.quick else THOROUGH_S
    samples = measure_samples(runner, _limits(settings, runner), seconds, on_progress)
    model = f"{model_dir.name}, {runner.dtype}"
    return fit_profile(samples, model=model, **describe_device(runner.pool.device)), samples


def measure_samples(runner: Runner, limits: Limits, seconds: float, on_progress: Progress) -> list[Sample]:
    """Measures what a profile is fitted to.

    Args:
        runner: Used by this thread alone.
        seconds: To spend.
    """
    series = decode_series(limits) + prefill_series(limits) + mixed_series(limits)
    measured = measure(StepTimer(runner), series, seconds, partial(on_progress, "measuring"))
    return [Sample(step.work, ms) for step, ms in measured]


def run_budget(settings: BudgetSettings, model_dir: Path, on_progress: Progress) -> BudgetSweep:
    """Sweeps the token budget of mixed batches.

    Raises:
        CheckpointError: The model can't be run here.
        ConfigError: Nor can it with these settings, or the pool is too small for the sweep.
    """
    runner = _load(settings, model_dir, on_progress)
    largest = Step.decode(settings.decodes, settings.context) + Step.prefill(settings.prompt)
    if not _limits(settings, runner).allow(largest):
        raise ConfigError(
            f"{settings.decodes} decodes of {settings.context} tokens and a prompt of {settings.prompt} do not fit; "
            "raise --kv-memory, --max-num-seqs or --max-model-len, or ask for less"
        )
    return sweep_budget(
        StepTimer(runner),
        decodes=settings.decodes,
        context=settings.context,
        prompt=settings.prompt,
        seconds=BUDGET_S,
        on_progress=partial(on_progress, "measuring"),
    )


def describe_device(device: torch.device) -> dict[str, Any]:
    """What a profile says about the device: its name, its units, and in which steps they can be divided."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "units": properties.multi_processor_count, "unit_step": SM_STEP}
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            name = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), name)
    except OSError:
        pass
    return {"device": name, "units": len(os.sched_getaffinity(0)), "unit_step": 1}


def _load(settings: ModelSettings, model_dir: Path, on_progress: Progress) -> TorchRunner:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return TorchRunner(
        model_dir,
        dtype=settings.dtype,
        device=settings.device,
        kv_bytes=int(settings.kv_memory),
        max_model_len=settings.max_model_len,
        on_progress=on_progress,
    )


def _limits(settings: ModelSettings, runner: TorchRunner) -> Limits:
    return Limits(settings.max_num_seqs, runner.config.max_model_len, runner.num_pages)
