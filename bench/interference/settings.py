"""The settings of `cpd bench interference`."""

from collections.abc import Sequence

from pydantic import Field

from bench.settings import TargetSettings
from cpd.common.errors import ConfigError


class InterferenceSettings(TargetSettings):
    """One study: a grid of bursts."""

    decodes: int = Field(32, ge=1, description="Number of decode streams.")
    decode_len: int = Field(256, ge=1, description="Prompt tokens of each decode stream.")
    decode_output_len: int = Field(
        2048, ge=2, description="Output tokens of each decode stream; a stream that ends is started again."
    )
    prefills: str = Field("1,2,4,8,16", description="Numbers of prompts in a burst, comma-separated.")
    prefill_len: str = Field("128,512,2048,4096", description="Prompt lengths of a burst in tokens, comma-separated.")
    repeats: int = Field(3, ge=1, description="Bursts of each kind; tables show the median.")
    window_s: float = Field(
        1.0, gt=0, description="Seconds of steady decoding that are measured before a burst and required after it."
    )
    settle_s: float = Field(
        15.0,
        gt=0,
        description="Longest wait, in seconds, for steady decoding before a burst and for recovery after it.",
    )

    def grid(self) -> list[tuple[int, int]]:
        """The kinds of burst, (number of prompts, tokens of each), in ascending order of length.

        Raises:
            ConfigError: A list is malformed.
        """
        counts, lengths = _numbers("prefills", self.prefills), _numbers("prefill-len", self.prefill_len)
        return [(count, length) for length in lengths for count in counts]


def _numbers(name: str, text: str) -> Sequence[int]:
    try:
        numbers = {int(part) for part in text.split(",")}
    except ValueError:
        numbers = set()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{name}: expected comma-separated positive numbers such as 128,512, got {text!r}")
    return sorted(numbers)
