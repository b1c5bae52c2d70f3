"""The performance model: predicts how long a step takes on a device.

A step runs its kernels one after the other, so its time is a sum:

    step_ms = curve(tokens) + seq_ms · seqs + context_ms · context + pair_ms · pairs

    curve(tokens)   linear layers: about flat while reading the weights bounds them, about linear while arithmetic does;
                    straight lines between knots
    seqs            sampling and other work per sequence
    context         attention that reads the context (bounds decodes)
    pairs           attention of every query with every key (bounds prefills)

Steps of decodes alone have their own coefficients: on a GPU they are replayed graphs, while other steps launch single
kernels. Each measured share of the device has its own, too. Between two shares, time is linear in 1 / share, which is
exact both for work that scales and for work that does not. While the other lane of a split runs, a lane is slower by a
measured factor.

Times are in ms. Shares are fractions of the device's compute units.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpd.common.errors import ConfigError
from cpd.performance.profiles import find_profile

_new = tuple.__new__  # makes a named tuple in half the time of a call of its class


class Work(NamedTuple):  # created three times faster than a frozen dataclass
    """The work of one step. Works can be added: a mixed step is `decode + prefill`.

    Attributes:
        tokens: Computed tokens.
        seqs: Their sequences.
        context: Tokens attended to, summed over the sequences.
        pairs: Pairs of a query and a key that it attends to, summed over the sequences.
    """

    tokens: int = 0
    seqs: int = 0
    context: int = 0
    pairs: int = 0

    @classmethod
    def decode(cls, seqs: int, context: int) -> Self:
        """Returns the work of one token for each of `seqs` sequences, which have `context` tokens in total."""
        return _new(cls, (seqs, seqs, context, context))

    @classmethod
    def prefill(cls, tokens: int, before: int = 0) -> Self:
        """Returns the work of a chunk of `tokens` tokens of one sequence that has `before` cached tokens."""
        return _new(cls, (tokens, 1, before + tokens, tokens * before + tokens * (tokens + 1) // 2))

    @classmethod
    def total(cls, works: Iterable["Work"]) -> Self:
        """Returns the sum, faster than by adding one after the other."""
        return cls(*map(sum, zip(*works, strict=True)))

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        tokens, seqs, context, pairs = other
        return _new(Work, (self.tokens + tokens, self.seqs + seqs, self.context + context, self.pairs + pairs))

    def __sub__(self, other: "Work") -> "Work":
        tokens, seqs, context, pairs = other
        return _new(Work, (self.tokens - tokens, self.seqs - seqs, self.context - context, self.pairs - pairs))

    @property
    def is_decode(self) -> bool:
        """True if each sequence computes one token."""
        return self.tokens == self.seqs


class _Part(BaseModel):
    # Unknown fields are ignored: a newer version may have written them.
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


MAX_MS = 1e9
"""Longest step: sums and products of such times remain finite."""

SLOWDOWN_LIMIT = 1e6

MIN_SHARE = 1e-3
"""Smallest share of a device: less than any compute unit."""

_Ms = Annotated[float, Field(ge=0, le=MAX_MS)]
_Tokens = Annotated[int, Field(ge=1, le=1 << 30)]


class StepCost(_Part):
    """Coefficients of one kind of step."""

    tokens: tuple[_Tokens, ...] = Field(min_length=1, description="Knots of the curve: 1, then ascending.")
    tokens_ms: tuple[_Ms, ...] = Field(description="The curve at the knots.")
    seq_ms: _Ms = Field(0.0, description="Time per sequence.")
    context_ms: _Ms = Field(0.0, description="Time per token of context.")
    pair_ms: _Ms = Field(0.0, description="Time per pair of a query and a key.")
    slowdown: float = Field(1.0, gt=0, le=SLOWDOWN_LIMIT, description="Factor while the other lane runs.")

    @model_validator(mode="after")
    def _curve(self) -> Self:
        if len(self.tokens) != len(self.tokens_ms):
            raise ValueError(f"{len(self.tokens)} knots, but {len(self.tokens_ms)} times")
        if self.tokens[0] != 1 or any(a >= b for a, b in pairwise(self.tokens)):
            raise ValueError("the knots must begin with 1 and ascend")
        if any(a > b for a, b in pairwise(self.tokens_ms)):
            raise ValueError("the times at the knots must not fall")
        return self


class ShareProfile(_Part):
    """Coefficients of one share of the device."""

    share: float = Field(ge=MIN_SHARE, le=1, description="Fraction of the device's compute units.")
    decode: StepCost = Field(description="Steps in which every sequence computes one token.")
    prefill: StepCost = Field(description="Steps with a prefill, mixed ones included.")


class TransferProfile(_Part):
    """Speed of moving KV pages between workers. The defaults are those of TCP on one host."""

    fixed_ms: _Ms = Field(0.5, description="Fixed time of each transfer.")
    bytes_per_ms: float = Field(1e6, ge=1e-3, description="A gigabyte a second is 1e6.")


class FitError(_Part):
    """Relative errors on samples to which the model was not fitted: 0.1 is 10 %."""

    samples: int = Field(ge=0, description="Number of measured steps.")
    median: float = Field(ge=0)
    p95: float = Field(ge=0)


class Profile(_Part):
    """A profile: the coefficients of a model on a device."""

    schema_name: Literal["cpd-profile/1"] = Field("cpd-profile/1", alias="schema")
    source: Literal["measured", "roofline"] = Field(description="roofline: computed from data sheets, not measured.")
    device: str
    model: str
    units: int = Field(1, ge=1, description="Compute units of the device: cores or SMs.")
    unit_step: int = Field(1, ge=1, description="Parts of the device are multiples of this, except a remainder.")
    page_bytes: int = Field(0, ge=0, description="Bytes of a KV page of the model; 0 if unknown.")
    num_pages: int = Field(0, ge=0, description="KV pages that fit in memory with the weights; 0 if unknown.")
    shares: tuple[ShareProfile, ...] = Field(min_length=1, description="Ascending; the whole device is last.")
    transfer: TransferProfile = TransferProfile()
    error: FitError | None = Field(None, description="Error of a measured profile.")

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if any(a.share >= b.share for a, b in pairwise(self.shares)) or self.shares[-1].share != 1:
            raise ValueError("the shares must ascend, and the last one must be 1")
        return self

    @classmethod
    def load(cls, profile: str | Path) -> Self:
        """Reads a profile.

        Args:
            profile: Path of a file, or name of a bundled profile.

        Raises:
            ConfigError: The file cannot be read or is not a profile; the message says where it is wrong.
        """
        path = find_profile(profile)
        try:
            return cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None

    @classmethod
    def parse(cls, content: bytes, origin: str) -> Self:
        """Parses a profile.

        Args:
            origin: Name of the content in errors.

        Raises:
            ConfigError: It is not a profile; the message says where it is wrong.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{origin} is not a profile written by `cpd profile`: {place and place + ': '}{first['msg']}"
            ) from None

    def save(self, path: Path) -> None:
        """Writes the profile as JSON.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            path.write_text(self.model_dump_json(indent=2, by_alias=True) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from None


class PerfModel:
    """Predicts times from a profile, in about a microsecond.

    Attributes:
        profile: The coefficients.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._shares = [part.share for part in profile.shares]
        self._costs = [(_Cost(part.decode), _Cost(part.prefill)) for part in profile.shares]
        self._transfer = profile.transfer.fixed_ms, 1 / profile.transfer.bytes_per_ms

    def step_ms(self, work: Work, share: float = 1.0, other_lane: Work | None = None) -> float:
        """Predicts the time of one step.

        Args:
            work: Work of the step; no work takes no time.
            share: Share of the device, in (0, 1].
            other_lane: Work that the other lane of the split computes at the same time.
        """
        tokens = work.tokens
        if not tokens:
            return 0.0
        kind = 0 if tokens == work.seqs else 1
        shared = other_lane is not None and other_lane.tokens > 0
        shares, costs = self._shares, self._costs
        upper = bisect_right(shares, share)
        if upper and shares[upper - 1] == share:
            return costs[upper - 1][kind].ms(work, shared)
        if len(shares) == 1:
            return costs[0][kind].ms(work, shared) / share
        upper = max(upper, 1)
        low, high = shares[upper - 1], shares[upper]
        low_ms, high_ms = costs[upper - 1][kind].ms(work, shared), costs[upper][kind].ms(work, shared)
        return high_ms + (low_ms - high_ms) * (1 / share - 1 / high) / (1 / low - 1 / high)

    def transfer_ms(self, num_bytes: int) -> float:
        """Predicts the time from sending the first byte to receiving the last one."""
        fixed_ms, ms_per_byte = self._transfer
        return fixed_ms + num_bytes * ms_per_byte


class _Cost:
    """A StepCost in a form that is fast to evaluate."""

    __slots__ = ("_bends", "_context_ms", "_lines", "_pair_ms", "_seq_ms", "_slowdown")

    def __init__(self, cost: StepCost) -> None:
        self._bends = cost.tokens[1:-1]  # ends of all lines but the last, which has none
        self._lines = _lines(cost.tokens, cost.tokens_ms)
        self._seq_ms, self._context_ms, self._pair_ms = cost.seq_ms, cost.context_ms, cost.pair_ms
        self._slowdown = cost.slowdown

    def ms(self, work: Work, shared: bool) -> float:
        start, slope = self._lines[bisect_right(self._bends, work.tokens)]
        ms = (
            start
            + slope * work.tokens
            + self._seq_ms * work.seqs
            + self._context_ms * work.context
            + self._pair_ms * work.pairs
        )
        return ms * self._slowdown if shared else ms


def _lines(knots: tuple[int, ...], values: tuple[float, ...]) -> list[tuple[float, float]]:
    """Returns value at 0 and slope of the line from each knot to the next; a constant if there is one knot."""
    if len(knots) == 1:
        return [(values[0], 0.0)]
    lines = []
    for (x, y), (next_x, next_y) in pairwise(zip(knots, values, strict=True)):
        slope = (next_y - y) / (next_x - x)
        lines.append((y - slope * x, slope))
    return lines
