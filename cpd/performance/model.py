"""The performance model: how long a step takes on a device, for everyone who must predict it.

A step runs its kernels one after the other, so its time is a sum, whose parts grow with what bounds each of them:

    linear layers   a curve over the step's tokens: about flat while reading the weights bounds them, about a straight
                    line while arithmetic does; straight lines between its knots
    sequences       sampling, and whatever else is done once for each
    attention       reading the context (bounds decodes), and every query with every key (bounds prefills)

Steps of decodes alone have numbers of their own: on a GPU they are replayed graphs, and others are launched kernel by
kernel. So has each measured share of the device. Between two shares time is a straight line over 1 / share, which is
exact for work that scales and for work that does not. A lane with company is slower by a measured factor.

Times are in ms, shares are of the device's compute units, 1 being all of them.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpd.common.errors import ConfigError


class Work(NamedTuple):  # made three times faster than a frozen dataclass
    """What one step computes, as far as its time goes. Works add up: a mixed step is `decode + prefill`.

    Attributes:
        tokens: Tokens computed.
        seqs: Sequences they belong to.
        context: Tokens attended to, summed over the sequences.
        pairs: Of a query and a key that it attends to, summed over the sequences.
    """

    tokens: int = 0
    seqs: int = 0
    context: int = 0
    pairs: int = 0

    @classmethod
    def decode(cls, seqs: int, context: int) -> Self:
        """One token for each of `seqs` sequences, which have `context` tokens in all."""
        return cls(seqs, seqs, context, context)

    @classmethod
    def prefill(cls, tokens: int, before: int = 0) -> Self:
        """A chunk of `tokens` tokens of one sequence, `before` of whose tokens are in the cache."""
        return cls(tokens, 1, before + tokens, tokens * before + tokens * (tokens + 1) // 2)

    @classmethod
    def total(cls, works: Iterable["Work"]) -> Self:
        """Their sum, in less time than it takes to add one after the other."""
        return cls(*map(sum, zip(*works, strict=True)))

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(
            self.tokens + other.tokens,
            self.seqs + other.seqs,
            self.context + other.context,
            self.pairs + other.pairs,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.tokens - other.tokens,
            self.seqs - other.seqs,
            self.context - other.context,
            self.pairs - other.pairs,
        )

    @property
    def is_decode(self) -> bool:
        """Whether each sequence computes one token."""
        return self.tokens == self.seqs


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


MOST_MS = 1e9
"""No step takes longer: sums and products of such times are still numbers."""

MOST_SLOWDOWN = 1e6

LEAST_SHARE = 1e-3
"""Of a device: less than any compute unit."""

_Ms = Annotated[float, Field(ge=0, le=MOST_MS)]
_Tokens = Annotated[int, Field(ge=1, le=1 << 30)]


class StepCost(_Part):
    """What one kind of steps costs."""

    tokens: tuple[_Tokens, ...] = Field(min_length=1, description="Knots of the curve: 1, and then ascending.")
    tokens_ms: tuple[_Ms, ...] = Field(description="Time of a step of that many tokens, without what follows.")
    seq_ms: _Ms = Field(0.0, description="For each sequence.")
    context_ms: _Ms = Field(0.0, description="For each token of context.")
    pair_ms: _Ms = Field(0.0, description="For each pair of a query and a key.")
    slowdown: float = Field(1.0, gt=0, le=MOST_SLOWDOWN, description="Factor while the other lane runs beside it.")

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
    """One share of the device."""

    share: float = Field(ge=LEAST_SHARE, le=1, description="Of the device's compute units.")
    decode: StepCost = Field(description="Steps in which every sequence computes one token.")
    prefill: StepCost = Field(description="Steps with a prefill, mixed ones included.")


class TransferProfile(_Part):
    """Moving KV pages from worker to worker. The defaults are those of TCP on one host."""

    fixed_ms: _Ms = Field(0.5, description="Of each transfer.")
    bytes_per_ms: float = Field(1e6, ge=1e-3, description="A gigabyte a second is 1e6.")


class FitError(_Part):
    """How far off the model was on samples that it was not fitted to. Errors are relative: 0.1 is 10 %."""

    samples: int = Field(ge=0, description="Measured steps.")
    median: float = Field(ge=0)
    p95: float = Field(ge=0)


class Profile(_Part):
    """What a profile file holds."""

    schema_name: Literal["cpd-profile/1"] = Field("cpd-profile/1", alias="schema")
    source: Literal["measured", "roofline"] = Field(description="roofline: computed from data sheets, no evidence.")
    device: str
    model: str
    units: int = Field(1, ge=1, description="Compute units of the device: cores, or SMs.")
    unit_step: int = Field(1, ge=1, description="It is cut into parts of this many units, and a remainder.")
    page_bytes: int = Field(0, ge=0, description="Of a KV page of the model; 0: not known.")
    num_pages: int = Field(0, ge=0, description="KV pages that fit beside the model's weights; 0: not known.")
    shares: tuple[ShareProfile, ...] = Field(min_length=1, description="Ascending, the whole device last.")
    transfer: TransferProfile = TransferProfile()
    error: FitError | None = Field(None, description="Of a measured profile.")

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if any(a.share >= b.share for a, b in pairwise(self.shares)) or self.shares[-1].share != 1:
            raise ValueError("the shares must ascend, and the last one must be 1")
        return self

    @classmethod
    def instant(cls) -> Self:
        """A device on which everything takes no time at all."""
        nothing = StepCost(tokens=(1,), tokens_ms=(0.0,))
        return cls(
            schema="cpd-profile/1",
            source="roofline",
            device="instant",
            model="any",
            shares=(ShareProfile(share=1.0, decode=nothing, prefill=nothing),),
            transfer=TransferProfile(fixed_ms=0.0, bytes_per_ms=1e300),
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a profile.

        Raises:
            ConfigError: The file cannot be read, or is no profile; one sentence says where it is wrong.
        """
        try:
            return cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from None

    @classmethod
    def parse(cls, content: bytes, origin: str) -> Self:
        """A profile from what a file holds.

        Args:
            origin: Names the content in errors.

        Raises:
            ConfigError: It is no profile; one sentence says where it is wrong.
        """
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{origin} is not a profile that `cpd profile` wrote: {place and place + ': '}{first['msg']}"
            ) from None

    def save(self, path: Path) -> None:
        """Writes it as JSON.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            path.write_text(self.model_dump_json(indent=2, by_alias=True) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from None


class PerfModel:
    """Predicts by a profile, in about a microsecond.

    Attributes:
        profile: Where the numbers come from.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._shares = [part.share for part in profile.shares]
        self._costs = [(_Cost(part.decode), _Cost(part.prefill)) for part in profile.shares]
        self._transfer = profile.transfer.fixed_ms, 1 / profile.transfer.bytes_per_ms

    def step_ms(self, work: Work, share: float = 1.0, beside: Work | None = None) -> float:
        """Time of one step.

        Args:
            work: What it computes; nothing takes no time.
            share: How much of the device it has, in (0, 1].
            beside: What the other lane runs meanwhile.
        """
        tokens = work.tokens
        if not tokens:
            return 0.0
        kind = 0 if tokens == work.seqs else 1
        company = beside is not None and beside.tokens > 0
        shares, costs = self._shares, self._costs
        upper = bisect_right(shares, share)
        if upper and shares[upper - 1] == share:
            return costs[upper - 1][kind].ms(work, company)
        if len(shares) == 1:
            return costs[0][kind].ms(work, company) / share
        upper = max(upper, 1)
        low, high = shares[upper - 1], shares[upper]
        low_ms, high_ms = costs[upper - 1][kind].ms(work, company), costs[upper][kind].ms(work, company)
        return high_ms + (low_ms - high_ms) * (1 / share - 1 / high) / (1 / low - 1 / high)

    def transfer_ms(self, num_bytes: int) -> float:
        """Time from the first byte's sending to the last one's arrival."""
        fixed_ms, ms_per_byte = self._transfer
        return fixed_ms + num_bytes * ms_per_byte


class _Cost:
    """A StepCost, laid out for speed."""

    __slots__ = ("_bends", "_context_ms", "_lines", "_pair_ms", "_seq_ms", "_slowdown")

    def __init__(self, cost: StepCost) -> None:
        self._bends = cost.tokens[1:-1]  # where one line ends and the next one begins; the last one goes on for ever
        self._lines = _lines(cost.tokens, cost.tokens_ms)
        self._seq_ms, self._context_ms, self._pair_ms = cost.seq_ms, cost.context_ms, cost.pair_ms
        self._slowdown = cost.slowdown

    def ms(self, work: Work, company: bool) -> float:
        start, slope = self._lines[bisect_right(self._bends, work.tokens)]
        ms = (
            start
            + slope * work.tokens
            + self._seq_ms * work.seqs
            + self._context_ms * work.context
            + self._pair_ms * work.pairs
        )
        return ms * self._slowdown if company else ms


def _lines(knots: tuple[int, ...], values: tuple[float, ...]) -> list[tuple[float, float]]:
    """Value at 0 and slope of the line from each knot to the next; a constant if there is one knot."""
    if len(knots) == 1:
        return [(values[0], 0.0)]
    lines = []
    for (x, y), (next_x, next_y) in pairwise(zip(knots, values, strict=True)):
        slope = (next_y - y) / (next_x - x)
        lines.append((y - slope * x, slope))
    return lines
