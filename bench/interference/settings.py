"""The settings of `cpd bench interference`."""

from collections.abc import Sequence

from pydantic import Field

from bench.settings import TargetSettings
from cpd.common.errors import ConfigError


class InterferenceSettings(TargetSettings):
    """One study: a grid of bursts."""

    decodes: int = Field(32, ge=1, description="Streams that decode all the time.")
    decode_len: int = Field(256, ge=1, description="Prompt tokens of each of them.")
    decode_output_len: int = Field(
        2048, ge=2, description="Output tokens of each of them; the more, the longer it lasts before it starts again."
    )
    prefills: str = Field("1,2,4,8,16", description="How many prompts a burst injects at once, as a list.")
    prefill_len: str = Field("128,512,2048,4096", description="Tokens of each injected prompt, as a list.")
    repeats: int = Field(3, ge=1, description="Bursts of each kind; tables show the median.")
    window_s: float = Field(
        1.0, gt=0, description="Decoding is measured for so long before a burst, and must be steady for so long after."
    )
    settle_s: float = Field(
        15.0,
        gt=0,
        description="Longest wait for decoding to be steady before a burst, and to recover to within 5 % after it.",
    )

    def grid(self) -> list[tuple[int, int]]:
        """Kinds of burst: (prompts, tokens of each), the smallest first.

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
        raise ConfigError(f"{name}: wants positive numbers with commas between, such as 128,512 (got {text!r})")
    return sorted(numbers)
