"""From settings to a workload."""

from bench.settings import WorkloadSettings
from bench.tokens import Texts
from bench.workloads.base import Workload
from bench.workloads.lengths import Distribution
from bench.workloads.random import RandomPrompts


def make_workload(settings: WorkloadSettings, texts: Texts, seed: int) -> Workload:
    """The workload that the settings ask for.

    Args:
        texts: Makes its prompts.
        seed: Not negative. Another one gives other prompts, which share no beginning with these.

    Raises:
        ConfigError: A setting is malformed or contradicts another one.
        BenchError: A file cannot be read or understood.
    """
    input_len = Distribution.parse(settings.input_len, "--input-len")
    output_len = Distribution.parse(settings.output_len, "--output-len")
    match settings.workload:
        case "random":
            return RandomPrompts(texts, seed, input_len, output_len)
    raise NotImplementedError
