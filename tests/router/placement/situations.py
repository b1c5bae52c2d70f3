"""Situations for placement policies."""

from collections.abc import Sequence
from random import Random

from router.placement.candidate import Candidate
from router.placement.policy import Prompt, Situation, Targets
from router.prefix_index.index import Prefixes


def situation(
    prompt: Prompt,
    combined: Sequence[Candidate],
    prefill: Sequence[Candidate] = (),
    cached: Prefixes = Prefixes(),  # noqa: B008 - immutable
    targets: Targets = Targets(),  # noqa: B008 - immutable
    *,
    now: float = 0.0,
    seed: int = 0,
    trusted: bool = True,
) -> Situation:
    """Returns a situation with a random generator of its own."""
    return Situation(prompt, combined, prefill, cached, targets, now, Random(seed), trusted)
