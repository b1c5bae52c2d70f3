"""When a stream moves away from a worker that is slow or full."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.blocks import blocks_for
from cpd.common.policy_settings import PolicySettings
from cpd.performance.colocation import Colocation, PrefillEstimator
from cpd.performance.model import Work
from router.placement.candidate import NOMINAL, Candidate
from router.placement.moves import LOOK_S, PATIENCE_S, SLOW, SPARE, Move, Moves, Stream
from router.placement.policy import Targets

SETTINGS = PolicySettings()
GROWTH = blocks_for(SETTINGS.horizon_tokens)


def stream(key: int = 0, tokens: int = 500, emitted: int = 20, max_tokens: int = 4000) -> Stream:
    return Stream(key, tokens, emitted, max_tokens, expected_output=256)


def worker(name: str, streams: int, slowdown: float = 1.0, pages: int = 100_000, context: int = 500) -> Candidate:
    return Candidate(
        name,
        f"{name}:1",
        PrefillEstimator(Colocation(NOMINAL), Work.decode(streams, streams * context), slowdown),
        page_bytes=1 << 20,
        num_pages=100_000,
        free_pages=pages,
        requests=streams,
    )


def moves(slo_itl_ms: float = 50.0) -> Moves:
    return Moves(Targets(slo_itl_ms=slo_itl_ms), SETTINGS)


def find(
    one: Candidate, others: list[Candidate], streams: list[Stream] | None = None, slo_itl_ms: float = 50.0
) -> Move | None:
    """What moves after the worker has been as it is for long enough."""
    finder = moves(slo_itl_ms)
    finder.find(one, streams or [stream()], others, 0.0)
    return finder.find(one, streams or [stream()], others, PATIENCE_S)


def test_a_stream_leaves_a_slow_worker_for_the_fastest_one() -> None:
    slow, busy, fast = worker("slow", 8, 2.0), worker("busy", 60), worker("fast", 4)
    move = find(slow, [busy, fast])
    assert move is not None
    assert (move.target, move.reason) == ("fast", "slow")
    assert move.itl_ms >= SLOW * move.new_itl_ms
    assert move.gain_ms > 0


def test_nothing_moves_between_workers_that_are_about_equal() -> None:
    assert find(worker("one", 12), [worker("other", 8), worker("third", 10)]) is None


def test_a_worker_must_be_slow_for_a_while() -> None:
    finder, slow, fast = moves(), worker("slow", 8, 2.0), worker("fast", 4)
    assert finder.find(slow, [stream()], [fast], 0.0) is None
    assert finder.find(slow, [stream()], [fast], PATIENCE_S - 0.01) is None
    assert finder.find(worker("slow", 8), [stream()], [fast], PATIENCE_S) is None  # it is fast for once
    assert finder.find(slow, [stream()], [fast], PATIENCE_S + 0.1) is None
    assert finder.find(slow, [stream()], [fast], 2 * PATIENCE_S + 0.1) is not None


def test_a_stream_that_came_back_starts_the_time_anew() -> None:
    finder, slow, fast = moves(), worker("slow", 8, 2.0), worker("fast", 4)
    finder.find(slow, [stream()], [fast], 0.0)
    finder.forget("slow")
    assert finder.find(slow, [stream()], [fast], PATIENCE_S) is None


def test_a_stream_that_ends_soon_is_not_worth_its_pause() -> None:
    slow, fast = worker("slow", 8, 2.0), worker("fast", 4)
    assert find(slow, [fast], [stream(emitted=98, max_tokens=100)]) is None
    assert find(slow, [fast], [stream(emitted=98, max_tokens=1000)]) is not None


def test_the_stream_with_most_expected_tokens_for_each_page_moves() -> None:
    long_left, long_context = stream(1, tokens=600, emitted=20), stream(2, tokens=20_000, emitted=20)
    soon_over = stream(3, tokens=300, emitted=20, max_tokens=40)
    move = find(worker("slow", 8, 2.0), [worker("fast", 4)], [soon_over, long_context, long_left])
    assert move is not None
    assert move.key == 1


def test_a_stream_leaves_a_worker_whose_pages_run_out_although_it_is_no_slower() -> None:
    full, roomy = worker("full", 8, pages=8 * GROWTH - 1), worker("roomy", 8)
    move = find(full, [roomy])
    assert move is not None
    assert move.reason == "full"
    assert find(worker("full", 8, pages=8 * GROWTH), [roomy]) is None


def test_no_stream_goes_where_pages_batch_slots_or_the_target_would_be_exceeded() -> None:
    slow = worker("slow", 8, 2.0)
    needed = 5 * SPARE * GROWTH + stream().pages
    assert find(slow, [worker("fast", 4, pages=needed)]) is not None
    assert find(slow, [worker("fast", 4, pages=needed - 1)]) is None
    assert find(slow, [replace(worker("fast", 4), max_num_seqs=4)]) is None
    assert find(slow, [worker("fast", 4)], slo_itl_ms=5.0) is None
    assert find(slow, [worker("fast", 4)], slo_itl_ms=0.0) is not None  # no target


def test_only_slow_and_full_workers_are_looked_at_closely() -> None:
    finder = moves()
    workers = [worker("slow", 8, 2.0), worker("fast", 4), worker("other", 6), worker("full", 4, pages=4 * GROWTH - 1)]
    suspicious = [one.worker_id for one in workers if finder.suspicious(one, lambda: workers, 0.0)]
    assert suspicious == ["slow", "full"]


def test_a_worker_that_stays_slow_is_looked_at_again_after_a_moment() -> None:
    finder, slow, fast = moves(), worker("slow", 8, 2.0), worker("fast", 4)
    assert finder.suspicious(slow, lambda: [slow, fast], 0.0)
    assert not finder.suspicious(slow, lambda: [slow, fast], LOOK_S / 2)
    assert finder.suspicious(slow, lambda: [slow, fast], LOOK_S)
    assert not finder.suspicious(worker("slow", 4), lambda: [slow, fast], LOOK_S)
    assert finder.suspicious(slow, lambda: [slow, fast], LOOK_S)  # it was fast meanwhile


@dataclass
class Host:
    """A worker of a simulated cluster, and its streams."""

    name: str
    slowdown: float
    pages: int
    streams: list[Stream] = field(default_factory=list)

    @property
    def candidate(self) -> Candidate:
        """The worker as routers see it."""
        count = len(self.streams)
        used = sum(one.pages for one in self.streams)
        context = sum(one.tokens for one in self.streams) // max(1, count)
        return worker(self.name, count, self.slowdown, max(0, self.pages - used), context)


hosts = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0, 4.0]), st.sampled_from([300, 2000, 100_000]), st.integers(0, 25)
    ),
    min_size=2,
    max_size=5,
)
lengths = st.lists(st.integers(20, 8000), min_size=1, max_size=8)


@given(hosts=hosts, lengths=lengths)
def test_moves_end_and_no_stream_takes_a_way_twice(hosts: list[tuple[float, int, int]], lengths: list[int]) -> None:
    """Whatever the workers, if streams neither grow nor end."""
    cluster, key = [], 0
    for index, (slowdown, pages, count) in enumerate(hosts):
        host = Host(f"worker-{index}", slowdown, pages)
        for _ in range(count):
            host.streams.append(stream(key, tokens=lengths[key % len(lengths)]))
            key += 1
        cluster.append(host)
    by_name = {host.name: host for host in cluster}
    taken: set[tuple[int, str, str]] = set()
    moving = True
    while moving:
        moving = False
        for host in cluster:
            others = [other.candidate for other in cluster if other is not host]
            move = find(host.candidate, others, host.streams, slo_itl_ms=0.0) if host.streams else None
            if move is None:
                continue
            (moved,) = [one for one in host.streams if one.key == move.key]
            host.streams.remove(moved)
            by_name[move.target].streams.append(moved)
            way = (moved.key, host.name, move.target)
            assert way not in taken
            taken.add(way)
            moving = True


@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_equally_fast_workers_with_as_many_streams_keep_them(count: int) -> None:
    cluster = [worker(f"worker-{index}", count + index % 2) for index in range(4)]
    for one in cluster:
        assert find(one, [other for other in cluster if other is not one], slo_itl_ms=0.0) is None
