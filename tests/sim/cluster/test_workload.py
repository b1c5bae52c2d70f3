from itertools import islice, takewhile

import numpy as np
import pytest

from bench.workloads.trace import TracedRequest
from cpd.common.errors import ConfigError
from sim.cluster.workload import AGENT, CHAT, Day, Mix, Trace


def sessions_of(mix: Mix, count: int = 600) -> list[list[int]]:
    return [[len(turn.token_ids) for turn in session.turns] for session in islice(mix.sessions(), count)]


@pytest.mark.parametrize("long_share", [0.0, 0.1, 0.5, 1.0])
def test_long_prompts_have_their_share_of_the_requests(long_share: float) -> None:
    sessions = sessions_of(Mix(10.0, long_share, 0.0, seed=1, max_len=40_960))
    requests = [length for session in sessions for length in session]
    assert np.mean([length > 8000 for length in requests]) == pytest.approx(long_share, abs=0.05)


def test_requests_arrive_at_the_rate() -> None:
    sessions = list(islice(Mix(20.0, 0.1, 0.5, seed=1, max_len=40_960).sessions(), 500))
    requests = sum(len(session.turns) for session in sessions)
    assert requests / sessions[-1].start_s == pytest.approx(20, rel=0.15)


def test_agents_share_their_system_prompts() -> None:
    sessions = list(islice(Mix(10.0, 0.0, 1.0, seed=1, max_len=40_960).sessions(), 200))
    openings = {tuple(session.turns[0].token_ids[: AGENT.shared]) for session in sessions}
    assert len(openings) == AGENT.groups


def test_a_mix_follows_from_its_seed() -> None:
    first, same, other = (sessions_of(Mix(10.0, 0.1, 0.5, seed, 40_960), 50) for seed in (1, 1, 2))
    assert first == same != other


def test_no_session_exceeds_the_longest_sequence() -> None:
    for session in islice(Mix(10.0, 0.5, 0.5, seed=1, max_len=10_000).sessions(), 200):
        total = sum(len(turn.token_ids) + turn.output_len for turn in session.turns)
        assert total < 10_000


def test_prompts_of_a_trace_share_the_traced_prefixes() -> None:
    requests = [
        TracedRequest(timestamp=0, input_length=1200, output_length=5, hash_ids=[1, 2, 3]),
        TracedRequest(timestamp=3000, input_length=1100, output_length=7, hash_ids=[1, 2, *range(4, 1_000_000)]),
        TracedRequest(timestamp=4000, input_length=90_000, output_length=7),
    ]
    first, second = Trace(requests, speedup=2.0, seed=0, max_len=40_960).sessions()
    assert (first.start_s, second.start_s) == (0.0, 1.5)
    (one,), (two,) = first.turns, second.turns
    assert (len(one.token_ids), one.output_len, len(two.token_ids)) == (1200, 5, 1100)
    assert one.token_ids[:1024] == two.token_ids[:1024]
    assert one.token_ids[1024:1040] != two.token_ids[1024:1040]


def test_a_trace_with_only_long_requests_is_an_error() -> None:
    requests = [TracedRequest(timestamp=0, input_length=90_000, output_length=7)]
    with pytest.raises(ConfigError, match="no request of the trace fits into --max-model-len 40960"):
        Trace(requests, speedup=1.0, seed=0, max_len=40_960)


def test_a_day_has_chats_by_day_and_long_prompts_at_night() -> None:
    hours: dict[str, list[float]] = {"chat": [], "agent": [], "long": []}
    for session in takewhile(lambda one: one.start_s < 2_400.0, Day(20.0, 2_400.0, 0, 40_960).sessions()):
        kind = {CHAT.shared: "chat", AGENT.shared: "agent", 0: "long"}[session.shared]
        hours[kind].append(session.start_s / 100)

    def share(kind: str, start: float, end: float) -> float:
        return sum(start <= hour < end for hour in hours[kind]) / len(hours[kind])

    assert share("chat", 8, 20) > 0.7
    assert share("agent", 17, 24) > 0.5
    assert share("long", 0, 8) > 0.6
