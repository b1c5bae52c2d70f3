"""Distributions of lengths and pauses from the command line: `512`, `uniform:256,1024`, `lognormal:512,0.5`."""

import math
from dataclasses import dataclass
from typing import Literal, Self, cast

import numpy as np

from cpd.common.errors import ConfigError

Kind = Literal["constant", "uniform", "normal", "lognormal"]

_MOST = 1e7
_FORMS = "a number, uniform:low,high, normal:mean,deviation or lognormal:median,sigma (ten millions at most)"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers from `least` to ten million.

    Args:
        kind: Kind of distribution.
        first: The constant, the lower end, the mean, or the median.
        second: The upper end, the standard deviation, or sigma (the standard deviation of the logarithm).
        least: Smallest value; smaller ones are raised to it.
    """

    kind: Kind
    first: float
    second: float
    least: float

    @classmethod
    def parse(cls, text: str, flag: str, least: float = 1) -> Self:
        """Parses a number, `uniform:low,high`, `normal:mean,deviation` or `lognormal:median,sigma`.

        Raises:
            ConfigError: The text has another form, or a value is below `least`; the message names `flag`.
        """
        kind, colon, numbers = text.strip().rpartition(":")
        if not colon:
            kind = "constant"
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if (
            kind not in ("constant", "uniform", "normal", "lognormal")
            or len(values) != (2 if colon else 1)
            or not all(abs(value) <= _MOST for value in values)
        ):
            raise ConfigError(f"{flag}: {text!r} is not {_FORMS}")
        first, second = values[0], values[-1]
        if first < least or (kind == "lognormal" and first == 0):
            raise ConfigError(f"{flag}: {text!r} is too small")
        if kind == "uniform" and second < first:
            raise ConfigError(f"{flag}: {text!r} ends below where it begins")
        if second < 0:
            raise ConfigError(f"{flag}: {text!r} has a negative spread")
        return cls(cast(Kind, kind), first, second, least)

    @property
    def mean(self) -> float:
        """Mean of the distribution without its limits."""
        match self.kind:
            case "uniform":
                return (self.first + self.second) / 2
            case "lognormal":
                return self.first * math.exp(self.second**2 / 2)
            case _:
                return self.first

    def draw(self, rng: np.random.Generator) -> float:
        """Draws a number."""
        match self.kind:
            case "constant":
                return self.first
            case "uniform":
                return rng.uniform(self.first, self.second)
            case "normal":
                number = rng.normal(self.first, self.second)
            case "lognormal":
                number = rng.lognormal(math.log(self.first), self.second)
        return min(max(number, self.least), _MOST)

    def tokens(self, rng: np.random.Generator) -> int:
        """Draws a number of tokens."""
        return round(self.draw(rng))
