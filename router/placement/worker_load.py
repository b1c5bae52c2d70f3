"""A router's estimate of a worker's load: the worker's last report, plus the requests sent to it since.

A report tells when the prompts on the worker will be computed. Between reports the router adds its own requests as it
sends them; it can't see those of other routers. What it learned of the worker (`learning.py`) corrects both.
"""

from collections.abc import Mapping
from math import exp, inf
from typing import Literal, get_args

from cpd.common.errors import ConfigError
from cpd.performance.colocation import Colocation, Mode, PrefillEstimator
from cpd.performance.model import MIN_SHARE, PerfModel, Profile, Work
from cpd.performance.split import SplitShares
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError, check_load
from router.placement.candidate import NOMINAL, Candidate
from router.placement.learning import FORGET_S, WorkerErrors

MAX_SLOWDOWN = 4.0
"""Limit on how many times slower, or faster, than its profile a worker counts."""

UNSEEN_S = 1.0
"""Time for which a prompt that a report does not name counts as on its way to the worker, in seconds. After that it is
one of the older prompts, which reports do not name, or has gone to another worker."""


_SHORTEST = Work.prefill(1)

Residency = Literal["serving", "waking", "draining", "asleep"]
"""Whether a worker's model is on its device (docs/models.md). `draining` says nothing about the process."""

_RESIDENCIES: Mapping[int, Residency] = {
    pb.Residency.STATE_WAKING: "waking",
    pb.Residency.STATE_DRAINING: "draining",
    pb.Residency.STATE_ASLEEP: "asleep",
}


class WorkerLoad:
    """One worker's load, as one router estimates it.

    Args:
        hello: The worker's description of itself.
        address: `host:port` of its session port.
        itl_ms: Assumed target for the gaps between tokens of its streams.
        errors: What is learned of it.

    Attributes:
        sequences: This router's sequences on the worker.
        errors: How the worker's times differ from this router's predictions.
        max_model_len: Longest prompt plus output, in tokens.

    Raises:
        ProtocolError: The profile or the lane shares are invalid.
    """

    def __init__(self, hello: pb.Hello, address: str, *, itl_ms: float, errors: WorkerErrors) -> None:
        self.sequences = 0
        self.errors = errors
        self.max_model_len: int = hello.max_model_len
        self._hello = hello
        self._address = address
        self._colocation = colocation_of(hello, itl_ms)
        self._estimator = PrefillEstimator(self._colocation)
        self._load = pb.Load(free_pages=hello.num_pages)
        self._idle_at = 0.0
        self._overdue_ms = 0.0
        self._others = 0
        self._decode_slowdown = 1.0
        self._at = 0.0
        self._serves_at = inf
        self._worked_at: float | None = None
        self._unanswered: dict[int, tuple[float, float]] = {}  # by request: when it was sent, and its prefill_ms
        self._candidate: Candidate | None = None

    @property
    def candidate(self) -> Candidate:
        """The worker as the policy sees it."""
        if self._candidate is None:
            load = self._load
            alone = not (self._others + self.sequences + len(self._unanswered))
            self._candidate = Candidate(
                worker_id=self._hello.worker_id,
                address=self._address,
                estimator=self._estimator,
                page_bytes=self._hello.page_bytes,
                host_page_ms=self._hello.host_page_ms,
                num_pages=self._hello.num_pages,
                free_pages=load.free_pages,
                cached_pages=load.cached_pages,
                idle_at=self._idle_at,
                overdue_ms=self._overdue_ms,
                requests=self._others + self.sequences,
                max_num_seqs=self._hello.max_num_seqs,
                decode_slowdown=self._decode_slowdown,
                overhead_ms=self.errors.overhead_ms(self._at, alone=alone),
                ttft_factor=self.errors.ttft_factor(self._at, alone=alone),
                alone=alone,
                serving=residency_of(load) == "serving",
                serves_at=self._serves_at,
            )
        return self._candidate

    def on_report(self, load: pb.Load, now: float) -> None:
        """Takes in the worker's load report.

        Raises:
            ProtocolError: A figure is out of range.
        """
        check_load(load)
        self._load = load
        if load.running + load.waiting or self._worked_at is None:
            self._worked_at = now
        # without requests, a worker can't show that it has recovered
        slowdown = _limited(load.slowdown) ** exp((self._worked_at - now) / FORGET_S)
        self._at = now
        decodes = Work.decode(load.decodes, load.decode_context)
        self._estimator = PrefillEstimator(self._colocation, decodes, slowdown)
        factor = self.errors.ttft_factor(now) * slowdown
        self._others = max(0, load.running + load.waiting - self.sequences)
        if self._hello.profile:
            prefill_ms = factor * (load.prefill_ms - load.overdue_ms)
            self._overdue_ms = factor * load.overdue_ms
            alone_ms = self._estimator.alone_ms
            self._decode_slowdown = _limited(load.step_ms / alone_ms if alone_ms else 0.0)
        else:
            prefill_ms = self.errors.ttft_factor(now) * load.waiting_tokens * self._estimator.token_ms
        seen = set(load.awaiting_first_token)
        unseen_ms = sum(ms for key, (at, ms) in self._unanswered.items() if key not in seen and now - at < UNSEEN_S)
        self._idle_at = now + (prefill_ms + unseen_ms) / 1e3
        self._serves_at = now + (load.residency.serves_in_s or inf)
        self._candidate = None

    def prompt_sent(self, key: int, prefill_ms: float, now: float) -> None:
        """Adds a prompt that was sent to the worker, with a predicted prefill of `prefill_ms`.

        Args:
            key: The number by which load reports name the request until it has its first token.
        """
        if self._idle_at > now:  # prompts that wait together share steps, and so the time that every step takes
            shared_ms = self.errors.ttft_factor(now) * self._estimator.step_ms(_SHORTEST)
            prefill_ms = max(0.0, prefill_ms - shared_ms)
        self._unanswered[key] = (now, prefill_ms)
        self._idle_at = max(self._idle_at, now) + prefill_ms / 1e3
        self._candidate = None

    def prompt_answered(self, key: int) -> None:
        """Forgets a prompt that has its first token, or whose request was withdrawn."""
        if self._unanswered.pop(key, None) and not self._unanswered:
            self._candidate = None  # it may be alone now

    def sequences_started(self, count: int) -> None:
        """Adds sequences of this router that will decode on the worker."""
        self.sequences += count
        self._candidate = None

    def sequences_ended(self, count: int) -> None:
        """Removes sequences of this router that have left the worker."""
        self.sequences -= count
        self._candidate = None


def residency_of(load: pb.Load) -> Residency:
    """The state of the model of a worker with this load report; `serving` if its device is not shared."""
    return _RESIDENCIES.get(load.residency.state, "serving")


def _limited(slowdown: float) -> float:
    """A measured slowdown within limits; 0 is unknown."""
    return min(max(slowdown or 1.0, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN)


def colocation_of(hello: pb.Hello, itl_ms: float) -> Colocation:
    """The rule by which the worker places prefills while its streams decode.

    Raises:
        ProtocolError: The profile or the lane shares are invalid.
    """
    shares = hello.decode_shares
    if not all(MIN_SHARE <= share <= 1 - MIN_SHARE for share in shares):
        raise ProtocolError(f"its decode lanes have the shares {list(shares)[:3]} of the device")
    mode: Mode = hello.colocate if hello.colocate in get_args(Mode) else "mixed"  # type: ignore[assignment]
    return Colocation(
        _model(hello.profile) if hello.profile else NOMINAL,
        token_budget=hello.token_budget,
        mode=mode,
        splits=[SplitShares(1 - share, share) for share in shares],
        itl_ms=itl_ms,
    )


def _model(profile: bytes) -> PerfModel:
    try:
        return PerfModel(Profile.parse(profile, "its performance profile"))
    except ConfigError as error:
        raise ProtocolError(str(error)) from None
