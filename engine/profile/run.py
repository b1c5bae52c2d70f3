"""Runs `cpd profile`: loads a model as a worker does, measures it, and fits the performance model."""

from functools import partial
from pathlib import Path

from cpd.common.errors import ConfigError
from cpd.common.settings import ModelSettings
from cpd.performance.fit import Sample, fit_profile
from cpd.performance.model import Profile
from engine.execution.cpu.lanes import own_cores, use_threads
from engine.execution.runner import TorchRunner
from engine.execution.torch_device import explain_gpu_errors
from engine.profile.budget import BudgetSweep, sweep_budget
from engine.profile.labels import profile_labels
from engine.profile.lanes import measure_samples
from engine.profile.measure import Limits, Progress
from engine.profile.settings import BudgetSettings, ProfileSettings
from engine.profile.steps import Step, StepBatches, step_timer

QUICK_S, THOROUGH_S = 60.0, 240.0
BUDGET_S = 60.0


@explain_gpu_errors()
def run_profile(settings: ProfileSettings, model_dir: Path, on_progress: Progress) -> tuple[Profile, list[Sample]]:
    """Measures a model on this device.

    Args:
        settings: What to measure. No file is written.
        model_dir: Directory of the checkpoint.

    Returns:
        The profile, and the samples to which it was fitted.

    Raises:
        CheckpointError: The model can't run on this machine.
        ConfigError: The model can't run with these settings, or they leave too little to measure.
    """
    runner = _load(settings, model_dir, on_progress)
    seconds = QUICK_S if settings.quick else THOROUGH_S
    samples = measure_samples(runner, _limits(settings, runner), seconds, on_progress)
    try:
        here = profile_labels(model_dir, runner.dtype, runner.pool.device)
        return fit_profile(samples, **here, page_bytes=runner.page_bytes), samples
    except ValueError as error:
        raise ConfigError(f"{error}; raise --max-num-seqs, --max-model-len or --kv-memory") from None


@explain_gpu_errors()
def run_budget(settings: BudgetSettings, model_dir: Path, on_progress: Progress) -> BudgetSweep:
    """Measures token budgets of mixed batches.

    Raises:
        CheckpointError: The model can't run on this machine.
        ConfigError: The model can't run with these settings, or the pool is too small for the sweep.
    """
    runner = _load(settings, model_dir, on_progress)
    largest = Step.decode(settings.decodes, settings.context) + Step.prefill(settings.prompt)
    if not _limits(settings, runner).allow(largest):
        raise ConfigError(
            f"{settings.decodes} decodes of {settings.context} tokens and a prompt of {settings.prompt} do not fit; "
            "raise --kv-memory, --max-num-seqs or --max-model-len, or measure fewer or shorter ones"
        )
    return sweep_budget(
        step_timer(runner.full, StepBatches(runner)),
        decodes=settings.decodes,
        context=settings.context,
        prompt=settings.prompt,
        seconds=BUDGET_S,
        on_progress=partial(on_progress, "measuring"),
    )


def _load(settings: ModelSettings, model_dir: Path, on_progress: Progress) -> TorchRunner:
    use_threads(own_cores())
    return TorchRunner(
        model_dir,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        device=settings.device,
        kv_bytes=settings.kv_memory,
        gpu_memory=settings.gpu_memory,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        on_progress=on_progress,
    )


def _limits(settings: ModelSettings, runner: TorchRunner) -> Limits:
    return Limits(settings.max_num_seqs, runner.config.max_model_len, runner.num_pages)
