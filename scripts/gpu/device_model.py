"""Measures the performance model of the device, from which the engine decides how to use its lanes."""

from pathlib import Path

from cpd.performance.fit import fit_profile
from cpd.performance.model import PerfModel, Profile
from engine.execution.runner import TorchRunner
from engine.profile.labels import profile_labels
from engine.profile.lanes import measure_samples
from engine.profile.measure import Limits
from scripts.gpu.results import Report

SECONDS = 45.0
"""Time to measure all lanes. `cpd profile` takes longer; that does not improve the predictions used here."""


def device_model(
    report: Report, runner: TorchRunner, name: str, *, most_seqs: int, seconds: float = SECONDS
) -> PerfModel:
    """Loads the profile that an earlier experiment measured on this device, or measures and saves it.

    Args:
        report: Its folder holds the profile.
        runner: The runner to measure; nothing else may use it meanwhile.
        name: Name of the model.
        most_seqs: Most decodes in a batch; a prompt may join them.
        seconds: Time to measure.
    """
    path = report.out / f"profile-{name}.json" if report.out else None
    if path is not None and path.exists():
        return PerfModel(Profile.load(path))
    limits = Limits(most_seqs + 1, runner.config.max_model_len, runner.num_pages)
    samples = measure_samples(runner, limits, seconds, lambda _what, _fraction: None)
    here = profile_labels(Path(name), runner.dtype, runner.pool.device)
    profile = fit_profile(samples, **here, page_bytes=runner.page_bytes)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    return PerfModel(profile)
