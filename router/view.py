"""What a router knows of a worker's load: the worker's last report, and what this router sent it since.

A report says when the prompts there will be computed; between two reports time passes, and own requests are added as
they are sent. The worker's figures include what this router has on it, the rest is other routers' work. A worker whose
first tokens come much later than they were predicted to, for whatever reason, is reckoned with as that much slower.
"""

from dataclasses import dataclass
from math import exp, log
from typing import get_args

from cpd.colocation import Beside, Colocation, Mode
from cpd.errors import ConfigError
from cpd.perfmodel import LEAST_SHARE, PerfModel, Profile, Work
from cpd.rpc import cpd_pb2 as pb
from cpd.split import LaneSplit
from router.candidate import LATE_MS, NOMINAL, Candidate
from router.checks import NonsenseError, check_load

MOST_PROFILE_BYTES = 1 << 18

MOST_SPLITS = 64

MOST_SLOWER = 4.0
"""A worker counts as at most so many times slower, or faster, than its profile says: one that gets no work can't show
that it is better now."""

UNSEEN_S = 1.0
"""A request that a report does not name is under way, unless it was sent longer ago than that: reports name the newest
ones only, and it may have gone to another worker."""


RECENT = 8
"""So many of the last first tokens say how late a worker is, about."""

LATE = 2.0
"""So many times later than predicted is still usual: only beyond that a worker is reckoned with as later."""

MOST_LATE = 64.0

LATE_STEP_MS = 1.0
"""Each step of a late worker takes so much longer for each time that it is later: its profile may be all zeros."""

FORGOTTEN_S = 60.0
"""Late first tokens count the less the longer ago they were: a worker that gets no work is tried again."""


@dataclass(slots=True)
class Predictions:
    """How well the TTFTs of prompts that a worker computed were predicted.

    Attributes:
        count: First tokens.
        ttft_ms: How long they took, summed.
        error_ms: How far off the predictions were, summed; too short or too long alike.
    """

    count: int = 0
    ttft_ms: float = 0.0
    error_ms: float = 0.0
    _log: float = 0.0  # of how many times later than predicted, without correction, the recent ones came
    _at: float = 0.0

    def add(self, predicted_ms: float, actual_ms: float, corrected: float, now: float) -> None:
        """Another first token came.

        Args:
            corrected: `Candidate.late` at the prediction.
            now: In seconds.
        """
        self.count += 1
        self.ttft_ms += actual_ms
        self.error_ms += abs(actual_ms - predicted_ms)
        times = corrected * (actual_ms + LATE_MS) / (predicted_ms + LATE_MS)
        before = self._faded(now)
        self._log = before + (log(times) - before) / RECENT
        self._at = now

    def late(self, now: float) -> float:
        """How many times later than predicted first tokens are to be reckoned with: 1 unless that is unusual."""
        return min(max(exp(self._faded(now)) - (LATE - 1.0), 1.0), MOST_LATE)

    def _faded(self, now: float) -> float:
        return self._log * exp((self._at - now) / FORGOTTEN_S)


class WorkerView:
    """One worker's load, as one router sees it.

    Args:
        hello: What the worker said of itself.
        address: `host:port` where it takes sessions and fills.
        itl_ms: The target for gaps between tokens that its streams are taken to have.

    Attributes:
        sequences: Own ones on this worker.
        predictions: Of own prompts that it computed.
        max_model_len: Longest prompt plus output that it takes, in tokens.

    Raises:
        NonsenseError: Its profile is none, or its lanes can't be.
    """

    def __init__(self, hello: pb.Hello, address: str, *, itl_ms: float) -> None:
        self.sequences = 0
        self.predictions = Predictions()
        self.max_model_len: int = hello.max_model_len
        self._hello = hello
        self._address = address
        self._rule = _rule(hello, itl_ms)
        self._beside = Beside(self._rule)
        self._load = pb.Load(free_pages=hello.num_pages)
        self._idle_at = 0.0
        self._passed_ms = 0.0
        self._others = 0
        self._stretch = 1.0
        self._late = 1.0
        self._sent: dict[int, tuple[float, float]] = {}  # when, and for how long: those that were not answered
        self._candidate: Candidate | None = None

    @property
    def candidate(self) -> Candidate:
        """The worker as the policy sees it."""
        if self._candidate is None:
            load = self._load
            self._candidate = Candidate(
                worker_id=self._hello.worker_id,
                address=self._address,
                beside=self._beside,
                page_bytes=self._hello.page_bytes,
                host_page_ms=self._hello.host_page_ms,
                num_pages=self._hello.num_pages,
                free_pages=load.free_pages,
                cached_pages=load.cached_pages,
                idle_at=self._idle_at,
                passed_ms=self._passed_ms,
                requests=self._others + self.sequences,
                max_num_seqs=self._hello.max_num_seqs,
                stretch=self._stretch,
                late=self._late,
            )
        return self._candidate

    def reported(self, load: pb.Load, now: float) -> None:
        """The worker has sent its load.

        Raises:
            NonsenseError: It makes no sense.
        """
        check_load(load, self._hello.num_pages)
        self._load = load
        slower = min(max(load.slower or 1.0, 1 / MOST_SLOWER), MOST_SLOWER)
        self._late = self.predictions.late(now)
        more_ms = (self._late - 1.0) * LATE_STEP_MS
        self._beside = Beside(self._rule, Work.decode(load.decodes, load.decode_context), slower * self._late, more_ms)
        self._others = max(0, load.running + load.waiting - self.sequences)
        if self._hello.profile:
            prefill_ms = self._beside.slower * (load.prefill_ms - load.late_ms)
            self._passed_ms = self._beside.slower * load.late_ms
            alone_ms = self._beside.alone_ms
            self._stretch = min(max(load.step_ms / alone_ms, 1.0), MOST_SLOWER) if alone_ms else 1.0
        else:
            prefill_ms = load.waiting_tokens * self._beside.token_ms
        seen = set(load.unanswered)
        unseen_ms = sum(ms for key, (at, ms) in self._sent.items() if key not in seen and now - at < UNSEEN_S)
        self._idle_at = now + (prefill_ms + unseen_ms) / 1e3
        self._candidate = None

    def sent(self, key: int, prefill_ms: float, now: float) -> None:
        """A prompt goes to the worker, which will take it so long to compute.

        Args:
            key: What the worker calls it in reports. It names the prompt until it is answered.
        """
        self._sent[key] = (now, prefill_ms)
        self._idle_at = max(self._idle_at, now) + prefill_ms / 1e3
        self._candidate = None

    def answered(self, key: int) -> None:
        """The first token of a prompt is there, or nobody waits for it any more."""
        self._sent.pop(key, None)

    def began(self, sequences: int) -> None:
        """Own sequences are going to decode on the worker."""
        self.sequences += sequences
        self._candidate = None

    def ended(self, sequences: int) -> None:
        """Own sequences are not on the worker any more."""
        self.sequences -= sequences
        self._candidate = None


def _rule(hello: pb.Hello, itl_ms: float) -> Colocation:
    """By which the worker computes prompts beside its streams."""
    shares = hello.decode_shares
    if len(shares) > MOST_SPLITS or not all(LEAST_SHARE <= share <= 1 - LEAST_SHARE for share in shares):
        raise NonsenseError(
            f"it said that its decode lanes have {len(shares)} shares of the device: {list(shares)[:3]}"
        )
    mode: Mode = hello.colocate if hello.colocate in get_args(Mode) else "mixed"  # type: ignore[assignment]
    return Colocation(
        _model(hello.profile) if hello.profile else NOMINAL,
        token_budget=hello.token_budget,
        mode=mode,
        splits=[LaneSplit(1 - share, share) for share in shares],
        itl_ms=itl_ms,
    )


def _model(profile: bytes) -> PerfModel:
    if len(profile) > MOST_PROFILE_BYTES:
        raise NonsenseError(f"what it predicts with has {len(profile)} bytes, and no profile needs so many")
    try:
        return PerfModel(Profile.parse(profile, "what it predicts with"))
    except ConfigError as error:
        raise NonsenseError(str(error)) from None
