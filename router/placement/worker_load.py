"""A router's estimate of a worker's load: the worker's last report, plus what this router has sent it since.

A report tells when the prompts on the worker will be computed. Between reports this router adds its own requests as it
sends them; everything else on the worker is other routers' work. If a worker's first tokens come much later than
predicted, for whatever reason, it counts as that much slower.
"""

from dataclasses import dataclass
from math import exp, log
from typing import get_args

from cpd.common.errors import ConfigError
from cpd.performance.colocation import Colocation, Mode, PrefillEstimator
from cpd.performance.model import LEAST_SHARE, PerfModel, Profile, Work
from cpd.performance.split import LaneSplit
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError, check_load
from router.placement.candidate import NOMINAL, TARDINESS_UNIT_MS, Candidate

MAX_SLOWDOWN = 4.0
"""A worker counts as at most this many times slower, or faster, than its profile: one that gets no work could not show
that it has recovered."""

UNSEEN_S = 1.0
"""A prompt that a report does not name counts as on its way to the worker for this long. After that it is one of the
older prompts, which reports do not name, or has gone to another worker."""

RECENT = 8
"""A worker's tardiness is an average over about this many first tokens."""

USUAL_TARDINESS = 2.0
"""Up to this tardiness a worker counts as punctual."""

MAX_TARDINESS = 64.0

TARDY_STEP_MS = 1.0
"""Added to a tardy worker's steps for each multiple of its tardiness, since its profile may be all zeros."""

FORGET_S = 60.0
"""Decay time of tardiness, so that a worker that gets no work is tried again."""


@dataclass(slots=True)
class TTFTErrors:
    """How well the TTFTs of the prompts computed by a worker were predicted.

    Attributes:
        count: First tokens.
        ttft_ms: Sum of their TTFTs.
        error_ms: Sum of the absolute errors of the predictions.
    """

    count: int = 0
    ttft_ms: float = 0.0
    error_ms: float = 0.0
    _log: float = 0.0  # mean logarithm of the recent ratios of actual to predicted, without correction
    _at: float = 0.0

    def add(self, predicted_ms: float, actual_ms: float, corrected: float, now: float) -> None:
        """Counts a first token.

        Args:
            corrected: `Candidate.tardiness` at the prediction.
            now: Time in seconds.
        """
        self.count += 1
        self.ttft_ms += actual_ms
        self.error_ms += abs(actual_ms - predicted_ms)
        ratio = corrected * (actual_ms + TARDINESS_UNIT_MS) / (predicted_ms + TARDINESS_UNIT_MS)
        before = self._decayed(now)
        self._log = before + (log(ratio) - before) / RECENT
        self._at = now

    def tardiness(self, now: float) -> float:
        """The factor by which to expect first tokens later than predicted: 1 unless they are unusually late."""
        return min(max(exp(self._decayed(now)) - (USUAL_TARDINESS - 1.0), 1.0), MAX_TARDINESS)

    def _decayed(self, now: float) -> float:
        return self._log * exp((self._at - now) / FORGET_S)


class WorkerLoad:
    """One worker's load, as one router estimates it.

    Args:
        hello: The worker's description of itself.
        address: `host:port` of its session port.
        itl_ms: Target for gaps between tokens that its streams are taken to have.

    Attributes:
        sequences: This router's sequences on the worker.
        ttft_errors: Of this router's prompts that the worker computed.
        max_model_len: Longest prompt plus output that it takes, in tokens.

    Raises:
        ProtocolError: Its profile or its lane shares are invalid.
    """

    def __init__(self, hello: pb.Hello, address: str, *, itl_ms: float) -> None:
        self.sequences = 0
        self.ttft_errors = TTFTErrors()
        self.max_model_len: int = hello.max_model_len
        self._hello = hello
        self._address = address
        self._rule = _rule(hello, itl_ms)
        self._beside = PrefillEstimator(self._rule)
        self._load = pb.Load(free_pages=hello.num_pages)
        self._idle_at = 0.0
        self._overdue_ms = 0.0
        self._others = 0
        self._decode_slowdown = 1.0
        self._tardiness = 1.0
        self._unanswered: dict[int, tuple[float, float]] = {}  # by request: when it was sent, and its prefill_ms
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
                overdue_ms=self._overdue_ms,
                requests=self._others + self.sequences,
                max_num_seqs=self._hello.max_num_seqs,
                decode_slowdown=self._decode_slowdown,
                tardiness=self._tardiness,
            )
        return self._candidate

    def on_report(self, load: pb.Load, now: float) -> None:
        """Takes in the worker's load report.

        Raises:
            ProtocolError: A figure is out of range.
        """
        check_load(load)
        self._load = load
        slowdown = min(max(load.slowdown or 1.0, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN)
        self._tardiness = self.ttft_errors.tardiness(now)
        more_ms = (self._tardiness - 1.0) * TARDY_STEP_MS
        decodes = Work.decode(load.decodes, load.decode_context)
        self._beside = PrefillEstimator(self._rule, decodes, slowdown * self._tardiness, more_ms)
        self._others = max(0, load.running + load.waiting - self.sequences)
        if self._hello.profile:
            prefill_ms = self._beside.slower * (load.prefill_ms - load.overdue_ms)
            self._overdue_ms = self._beside.slower * load.overdue_ms
            alone_ms = self._beside.alone_ms
            self._decode_slowdown = min(max(load.step_ms / alone_ms, 1.0), MAX_SLOWDOWN) if alone_ms else 1.0
        else:
            prefill_ms = load.waiting_tokens * self._beside.token_ms
        seen = set(load.awaiting_first_token)
        unseen_ms = sum(ms for key, (at, ms) in self._unanswered.items() if key not in seen and now - at < UNSEEN_S)
        self._idle_at = now + (prefill_ms + unseen_ms) / 1e3
        self._candidate = None

    def prompt_sent(self, key: int, prefill_ms: float, now: float) -> None:
        """A prompt was sent to the worker, with a predicted prefill of `prefill_ms`.

        Args:
            key: The request's number, which load reports name until it is answered.
        """
        self._unanswered[key] = (now, prefill_ms)
        self._idle_at = max(self._idle_at, now) + prefill_ms / 1e3
        self._candidate = None

    def prompt_answered(self, key: int) -> None:
        """The first token of a prompt has come, or the request was withdrawn."""
        self._unanswered.pop(key, None)

    def sequences_started(self, count: int) -> None:
        """This router's sequences are going to decode on the worker."""
        self.sequences += count
        self._candidate = None

    def sequences_ended(self, count: int) -> None:
        """This router's sequences have left the worker."""
        self.sequences -= count
        self._candidate = None


def _rule(hello: pb.Hello, itl_ms: float) -> Colocation:
    """The rule by which the worker computes prompts beside its streams."""
    shares = hello.decode_shares
    if not all(LEAST_SHARE <= share <= 1 - LEAST_SHARE for share in shares):
        raise ProtocolError(f"its decode lanes have the shares {list(shares)[:3]} of the device")
    mode: Mode = hello.colocate if hello.colocate in get_args(Mode) else "mixed"  # type: ignore[assignment]
    return Colocation(
        _model(hello.profile) if hello.profile else NOMINAL,
        token_budget=hello.token_budget,
        mode=mode,
        splits=[LaneSplit(1 - share, share) for share in shares],
        itl_ms=itl_ms,
    )


def _model(profile: bytes) -> PerfModel:
    try:
        return PerfModel(Profile.parse(profile, "its performance profile"))
    except ConfigError as error:
        raise ProtocolError(str(error)) from None
