"""A scheduler alone, without weights or tokens: each sample is token 1."""

from collections import abc

import numpy as np
import numpy.typing as npt

from cpd.performance.colocation import BatchLimit, PrefillBudget
from cpd.performance.model import Work
from engine.kv.block_pool import BlockPool
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.plan import Plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from tests.engine.fakes import make_request, prompt


class MixedScheduler(Scheduler):
    """A scheduler that puts everything into one batch."""

    def __init__(
        self,
        num_pages: int,
        token_budget: int,
        max_num_seqs: int,
        prefill_ms: abc.Callable[[Work, Work], float] = lambda work, decodes: 0.0,
        window: int = 0,
    ) -> None:
        cache = KVCacheManager(BlockPool(num_pages), lambda source, target: None)
        most = min(max_num_seqs, token_budget)
        super().__init__(
            cache,
            max_len=num_pages * 16,
            max_num_seqs=most,
            max_tokens=token_budget,
            prefill_ms=prefill_ms,
            window=window,
        )
        self._token_budget = token_budget

    def schedule(self) -> Plan:
        plan = self.schedule_decodes()
        assert not self.schedule_prefills(plan, PrefillBudget(BatchLimit(self._token_budget), chunked=True))
        return plan


def create_scheduler(
    num_pages: int = 64, *, token_budget: int = 64, max_num_seqs: int = 8, window: int = 0
) -> MixedScheduler:
    return MixedScheduler(num_pages, token_budget, max_num_seqs, window=window)


def add(scheduler: MixedScheduler, length: int, start: int = 0, number: int = 0) -> Sequence:
    """Adds a sequence with a prompt of this length."""
    request = make_request(str(number), prompt(length, start), max_tokens=1000)
    seq = Sequence(
        request=request,
        choices=[0],
        order=(number, 0),
        hashes=list(request.block_hashes),
        tokens=build_tokens(request.token_ids),
        num_tokens=length,
    )
    scheduler.add(seq)
    return seq


def build_tokens(token_ids: abc.Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(token_ids, dtype=np.int32)


def composition(plan: Plan) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of each chunk."""
    return [(chunk.seq.request.id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def compute(scheduler: MixedScheduler, plan: Plan) -> None:
    """Commits a step as if it had run: every chunk that samples gets one more token."""
    for chunk in plan.chunks:
        scheduler.commit(chunk, chunk.num_samples)
        scheduler.append(chunk.seq, [1] * chunk.num_samples)


def step(scheduler: MixedScheduler) -> list[tuple[str, int, int]]:
    plan = scheduler.schedule()
    compute(scheduler, plan)
    scheduler.check_integrity()
    return composition(plan)
