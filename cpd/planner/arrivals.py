"""Passes arrivals on from the routers, which see them, to the planner, which plans by those of all routers.

Each router counts by class since it began (`Arrivals`). The planner asks for the totals now and then, and adds what is
new to its own meter (`ArrivalFeed`). So a question that fails loses nothing, and a router that is restarted changes
nothing in what the planner has measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import NamedTuple

from typing_extensions import TypedDict

from cpd.planner.load import LoadMeter, RequestClass


class ClassTotals(TypedDict):
    """What a router has counted of one class: requests, sums of their tokens, answers, sum of their tokens.

    The tokens are those of `LoadMeter.arrived`.
    """

    half_octave: int
    quarter: int
    requests: int
    prompt_tokens: int
    local_tokens: int
    remote_tokens: int
    answers: int
    output_tokens: int


class Arrivals:
    """Counts a router's requests by class.

    Attributes:
        began: Names this start of the router: a random text.
    """

    def __init__(self) -> None:
        self.began = token_hex(8)
        self._totals: dict[RequestClass, ClassTotals] = {}

    def arrived(self, prompt_tokens: int, local_tokens: int, remote_tokens: int) -> RequestClass:
        """Counts a request; the arguments are those of `LoadMeter.arrived`."""
        local = max(1, local_tokens)
        key = RequestClass.of(prompt_tokens, local)
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = _none_of(key)
        totals["requests"] += 1
        totals["prompt_tokens"] += prompt_tokens
        totals["local_tokens"] += local
        totals["remote_tokens"] += max(local, remote_tokens)
        return key

    def answered(self, key: RequestClass, output_tokens: int) -> None:
        """Counts the answer to a request of this class."""
        totals = self._totals[key]
        totals["answers"] += 1
        totals["output_tokens"] += output_tokens

    def totals(self) -> list[ClassTotals]:
        """What was counted, by class."""
        return [one.copy() for one in self._totals.values()]


class _Answer(NamedTuple):
    """What a router has told: its `Arrivals.began`, its totals by class, and when that was."""

    began: str
    totals: dict[RequestClass, ClassTotals]
    at: float


@dataclass(slots=True)
class ArrivalFeed:
    """Adds the arrivals of all routers to a meter.

    Args:
        meter: Gets the arrivals.
    """

    meter: LoadMeter
    _answers: dict[str, _Answer] = field(default_factory=dict)  # the last ones, by router
    _keys: dict[RequestClass, RequestClass] = field(default_factory=dict)

    def add(self, router: str, began: str, totals: Sequence[ClassTotals], now: float) -> None:
        """Adds what a router has counted since the last time.

        It is taken to have arrived evenly since then. What a router had counted before it was first asked does not
        count: nobody knows when that was.

        Args:
            router: Its name.
            began: Its `Arrivals.began`. All that it counted since another start is new.
        """
        last = self._answers.get(router)
        by_class = {RequestClass(one["half_octave"], one["quarter"]): one for one in totals}
        self._answers[router] = _Answer(began, by_class, now)
        if last is None:
            return
        before = last.totals if last.began == began else {}
        for key, total in by_class.items():
            self._add_class(key, before.get(key) or _none_of(key), total, last.at, now)

    def _add_class(self, key: RequestClass, old: ClassTotals, new: ClassTotals, since: float, now: float) -> None:
        count = new["requests"] - old["requests"]
        for number in range(count):
            self._keys[key] = self.meter.arrived(
                round((new["prompt_tokens"] - old["prompt_tokens"]) / count),
                round((new["local_tokens"] - old["local_tokens"]) / count),
                round((new["remote_tokens"] - old["remote_tokens"]) / count),
                since + (number + 0.5) / count * (now - since),
            )
        answers = new["answers"] - old["answers"]
        if key in self._keys:  # else they answer requests from before
            for _ in range(answers):
                self.meter.answered(self._keys[key], round((new["output_tokens"] - old["output_tokens"]) / answers))


def _none_of(key: RequestClass) -> ClassTotals:
    return {
        "half_octave": key.half_octave,
        "quarter": key.quarter,
        "requests": 0,
        "prompt_tokens": 0,
        "local_tokens": 0,
        "remote_tokens": 0,
        "answers": 0,
        "output_tokens": 0,
    }
