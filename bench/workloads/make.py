"""Makes a workload from settings."""

from pathlib import Path

from bench.settings import WorkloadSettings
from bench.tokens import Texts
from bench.workloads.base import Workload
from bench.workloads.files import PromptFile
from bench.workloads.lengths import Distribution
from bench.workloads.multi_turn import MultiTurn
from bench.workloads.random import RandomPrompts
from bench.workloads.shared_prefix import SharedPrefix
from bench.workloads.trace import Trace
from cpd.common.errors import ConfigError

_PRESETS = {
    "heavy": {"input_len": "2048", "later_len": "512", "output_len": "256"},
    "light": {"input_len": "512", "later_len": "256", "output_len": "256"},
}


def make_workload(settings: WorkloadSettings, texts: Texts, seed: int) -> Workload:
    """Makes the workload of the settings.

    Args:
        settings: Kind and lengths of prompts.
        texts: Makes prompts.
        seed: Seed, at least 0. Different seeds give different prompts from the first words on.

    Raises:
        ConfigError: A setting is malformed or contradicts another one.
        BenchError: A file cannot be read or is malformed.
    """
    input_len, later_len, output_len = (
        Distribution.parse(_length(settings, name), f"--{name.replace('_', '-')}")
        for name in ("input_len", "later_len", "output_len")
    )
    match settings.workload:
        case "random":
            return RandomPrompts(texts, seed, input_len, output_len)
        case "shared-prefix":
            return SharedPrefix(
                texts, seed, input_len, output_len, groups=settings.prefix_groups, hit_rate=settings.hit_rate
            )
        case "multi-turn":
            return MultiTurn(
                texts,
                seed,
                turns=settings.turns,
                input_len=input_len,
                later_len=later_len,
                output_len=output_len,
                think_s=Distribution.parse(settings.think_s, "--think-s", least=0),
            )
        case "trace":
            return Trace(_file(settings), texts, seed, settings.speedup)
        case "jsonl":
            return PromptFile(_file(settings), texts, seed, output_len)


def _length(settings: WorkloadSettings, name: str) -> str:
    """A length of the preset, or else of the settings.

    Raises:
        ConfigError: Both give different lengths, or the preset is for another workload.
    """
    own: str = getattr(settings, name)
    if not settings.preset:
        return own
    if settings.workload != "multi-turn":
        raise ConfigError("--preset is for --workload multi-turn")
    preset = _PRESETS[settings.preset][name]
    if own not in (preset, WorkloadSettings.model_fields[name].default):
        raise ConfigError(
            f"--preset {settings.preset} sets --{name.replace('_', '-')} to {preset}: leave one of them out"
        )
    return preset


def _file(settings: WorkloadSettings) -> Path:
    if settings.file is None:
        raise ConfigError(f"--workload {settings.workload} needs --file")
    return settings.file
