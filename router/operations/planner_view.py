"""The document of `GET /load` on the admin port: what the planner needs to know of a router."""

from typing_extensions import TypedDict

from cpd.planner.arrivals import Arrivals, ClassTotals
from router.dispatch.workers import Workers

SHOWN = 8
"""Number of workers whose performance stands for all."""


class PlannedWorker(TypedDict):
    """A worker that is ready, with its requests and cached pages."""

    id: str
    role: str
    address: str
    incarnation: int
    requests: int
    cached_pages: int


class WorkerPerformance(TypedDict):
    """How fast a worker is. All but `slowdown` (`WorkerLoad`) are fields of its `Hello`, `profile` as text."""

    profile: str
    token_budget: int
    colocate: str
    decode_shares: list[float]
    max_num_seqs: int
    num_pages: int
    slowdown: float


class PlannerView(TypedDict):
    """What a router knows.

    Attributes:
        router: Its name.
        began, arrivals: See `cpd/planner/arrivals.py`.
        slo_ttft, slo_itl: The targets, in ms.
        expected_output: Tokens of an answer, before there are any.
        workers: All that are ready.
        performance: Of some of them.
    """

    router: str
    began: str
    arrivals: list[ClassTotals]
    slo_ttft: float
    slo_itl: float
    expected_output: int
    workers: list[PlannedWorker]
    performance: list[WorkerPerformance]


def planner_view(workers: Workers, arrivals: Arrivals, slo_ttft: float, slo_itl: float) -> PlannerView:
    """Returns what this router knows."""
    ready: list[PlannedWorker] = []
    performance: list[WorkerPerformance] = []
    for session in workers.sessions:
        hello, view = session.hello, session.worker_load
        if not session.live or not session.takes_any or hello is None or view is None:
            continue
        candidate = view.candidate
        ready.append(
            {
                "id": session.id,
                "role": session.role,
                "address": session.member.address,
                "incarnation": session.member.incarnation,
                "requests": candidate.requests,
                "cached_pages": candidate.cached_pages,
            }
        )
        performance.append(
            {
                "profile": hello.profile.decode(),
                "token_budget": hello.token_budget,
                "colocate": hello.colocate,
                "decode_shares": list(hello.decode_shares),
                "max_num_seqs": hello.max_num_seqs,
                "num_pages": hello.num_pages,
                "slowdown": candidate.estimator.slowdown,
            }
        )
    return {
        "router": workers.router_id,
        "began": arrivals.began,
        "arrivals": arrivals.totals(),
        "slo_ttft": slo_ttft,
        "slo_itl": slo_itl,
        "expected_output": workers.learning.settings.expected_output,
        "workers": ready,
        "performance": performance[:: max(1, -(-len(performance) // SHOWN))],
    }
