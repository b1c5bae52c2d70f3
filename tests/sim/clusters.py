"""Small simulated clusters."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpd.performance.model import PerfModel, Profile
from sim.cluster.policies import PolicyName
from sim.cluster.settings import SimSettings
from sim.cluster.simulation import Outcome, SimCluster
from sim.cluster.workload import Session, Turn, Workload

PROFILE = Path(__file__).resolve().parents[2] / "profiles" / "h200-qwen3-8b.json"
MODEL = PerfModel(Profile.load(PROFILE))
NETWORK_MS = 0.5


class Fixed(Workload):
    """These sessions."""

    def __init__(self, *sessions: Session) -> None:
        self._sessions = sessions

    def sessions(self) -> Iterator[Session]:
        return iter(self._sessions)


def settings(**fields: Any) -> SimSettings:
    """Two workers, everything measured."""
    known = {"profile": PROFILE, "workers": 2, "prefill_workers": 1, "warmup": 0.0, "duration": 5.0, "num_pages": 8000}
    return SimSettings(**{**known, **fields})


def prompt(length: int, start: int = 0) -> "array[int]":
    """Tokens; prompts with different starts share no block."""
    return array("i", [(start * 1_000 + 7 * i) % 100_000 for i in range(length)])


def one_turn(start_s: float, token_ids: "array[int]", output_len: int) -> Session:
    """A session of one turn."""
    return Session(start_s, [Turn(token_ids, output_len)])


def simulate(policy: PolicyName, *sessions: Session, **fields: Any) -> tuple[Outcome, SimCluster]:
    """Runs these sessions to their end."""
    cluster = SimCluster(settings(**fields), policy, Fixed(*sessions))
    return cluster.run(), cluster
