"""Small simulated clusters."""

from array import array
from collections.abc import Iterator
from typing import Any

from cpd.common.policy_settings import PolicySettings
from cpd.performance.model import PerfModel, Profile
from sim.cluster.settings import SimSettings
from sim.cluster.simulation import Outcome, SimCluster
from sim.cluster.workload import Session, Turn, Workload

MODEL = PerfModel(Profile.load("h200-qwen3-8b"))
NETWORK_MS = 0.5


class Fixed(Workload):
    """A workload of given sessions."""

    def __init__(self, *sessions: Session) -> None:
        self._sessions = sessions

    def sessions(self) -> Iterator[Session]:
        return iter(self._sessions)


def settings(**fields: Any) -> SimSettings:
    """Returns settings of two workers without warm-up."""
    if isinstance(fields.get("policy"), str):
        fields["policy"] = PolicySettings(name=fields["policy"])
    known = {"workers": 2, "prefill_workers": 1, "warmup": 0.0, "duration": 5.0, "num_pages": 8000}
    return SimSettings(**{**known, **fields})


def prompt(length: int, start: int = 0) -> "array[int]":
    """Returns prompt tokens; prompts with different starts share no block."""
    return array("i", [(start * 1_000 + 7 * i) % 100_000 for i in range(length)])


def one_turn(start_s: float, token_ids: "array[int]", output_len: int) -> Session:
    """Returns a session of one turn."""
    return Session(start_s, [Turn(token_ids, output_len)])


def simulate(policy: str, *sessions: Session, **fields: Any) -> tuple[Outcome, SimCluster]:
    """Simulates sessions to their end."""
    cluster = SimCluster(settings(policy=policy, **fields), Fixed(*sessions))
    return cluster.run(), cluster
