"""The performance model of the device under test, which decides how the engine uses its lanes."""

from pathlib import Path

from cpd.performance.fit import fit_profile
from cpd.performance.model import PerfModel, Profile
from engine.execution.runner import TorchRunner
from engine.profile.about import about
from engine.profile.lanes import measure_samples
from engine.profile.measure import Limits
from scripts.gpu.results import Report

SECONDS = 45.0
"""For measuring all lanes. `cpd profile` takes longer, and its prediction is as good where it matters here."""


def device_model(
    report: Report, runner: TorchRunner, name: str, *, most_seqs: int, seconds: float = SECONDS
) -> PerfModel:
    """What an experiment before this one measured on this device, or else measures it, and keeps it for the next.

    Args:
        report: The profile is a file beside its result.
        runner: Nothing else uses it meanwhile.
        name: Of the model.
        most_seqs: Of a batch.
    """
    path = report.out / f"profile-{name}.json" if report.out else None
    if path is not None and path.exists():
        return PerfModel(Profile.load(path))
    limits = Limits(most_seqs, runner.config.max_model_len, runner.num_pages)
    samples = measure_samples(runner, limits, seconds, lambda _what, _fraction: None)
    here = about(Path(name), runner.dtype, runner.pool.device)
    profile = fit_profile(samples, **here, page_bytes=runner.page_bytes)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    return PerfModel(profile)
