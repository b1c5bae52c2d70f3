from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cpd.blocks import BLOCK_SIZE
from router.candidate import Candidate
from router.policy import Placement, PolicySettings, Prompt, place


def _worker(name: str, requests: int = 0, idle_at: float = 0.0) -> Candidate:
    return Candidate(name, f"{name}:1", requests=requests, idle_at=idle_at)


def _place(
    tokens: int,
    combined: list[Candidate],
    prefill: list[Candidate] | None = None,
    cached: dict[str, int] | None = None,
    threshold: int = 64,
    seed: int = 0,
) -> Placement | None:
    settings = PolicySettings(long_prefill_tokens=threshold)
    return place(Prompt(tokens), combined, prefill or [], cached or {}, settings, now=0.0, rng=Random(seed))


def _decode(placement: Placement | None) -> str:
    assert placement is not None
    return placement.decode.worker_id


def test_nothing_is_placed_without_a_combined_worker() -> None:
    assert _place(10, [], [_worker("p")]) is None


def test_equals_are_chosen_at_random() -> None:
    chosen = {_decode(_place(100, [_worker("a"), _worker("b"), _worker("c")], seed=seed)) for seed in range(50)}
    assert chosen == {"a", "b", "c"}


@given(
    tokens=st.integers(1, 2_000),
    cached=st.integers(0, 100),
    threshold=st.integers(0, 1_000),
    live=st.booleans(),
)
def test_remote_means_more_uncached_tokens_than_the_threshold_and_a_prefill_worker(
    tokens: int, cached: int, threshold: int, live: bool
) -> None:
    cached = min(cached, tokens // BLOCK_SIZE)
    prefill = [_worker("p")] if live else []
    placement = _place(tokens, [_worker("d")], prefill, {"d": cached}, threshold)
    assert placement is not None
    remote = tokens - cached * BLOCK_SIZE > threshold and live
    assert placement.prefill == (tuple(prefill) if remote else ())


def test_prefill_workers_are_tried_by_their_own_cache_then_their_load() -> None:
    prefill = [_worker("a", idle_at=1.0), _worker("b"), _worker("c")]
    placement = _place(500, [_worker("d")], prefill, {"b": 3})
    assert placement is not None
    assert [one.worker_id for one in placement.prefill] == ["b", "c", "a"]
