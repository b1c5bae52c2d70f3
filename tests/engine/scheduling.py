"""A scheduler alone, without weights or tokens: each sample is token 1."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cpd.colocation import Room
from engine.admission import Admission
from engine.live import LiveSequences
from engine.plan import Plan
from engine.pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Seq
from tests.engine.fakes import make_request, prompt


class MixedScheduler(Scheduler):
    """Puts everything into one batch."""

    def __init__(self, num_pages: int, token_budget: int, max_num_seqs: int) -> None:
        self.live = LiveSequences(
            BlockPool(num_pages),
            max_len=num_pages * 16,
            max_num_seqs=min(max_num_seqs, token_budget),
            copy_page=lambda source, target: None,
        )
        self.admission = Admission(self.live)
        super().__init__(self.live, self.admission)
        self._token_budget = token_budget

    def schedule(self) -> Plan:
        plan = self.decodes()
        assert not self.prefills(plan, Room(self._token_budget - len(plan.singles), cut=True))
        return plan


def create_scheduler(num_pages: int = 64, *, token_budget: int = 64, max_num_seqs: int = 8) -> MixedScheduler:
    return MixedScheduler(num_pages, token_budget, max_num_seqs)


def add(scheduler: MixedScheduler, length: int, start: int = 0, number: int = 0) -> Seq:
    """A sequence with a prompt of this length."""
    request = make_request(str(number), prompt(length, start), max_tokens=1000)
    seq = Seq(
        request=request,
        choices=[0],
        order=(number, 0),
        hashes=list(request.block_hashes),
        tokens=build_tokens(request.token_ids),
        num_tokens=length,
    )
    scheduler.admission.add(seq)
    return seq


def build_tokens(token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(token_ids, dtype=np.int32)


def composition(plan: Plan) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of each chunk."""
    return [(chunk.seq.request.id, chunk.start, chunk.count) for chunk in plan.chunks]


def compute(scheduler: MixedScheduler, plan: Plan) -> None:
    """As if the step had run: every chunk that samples gets one more token."""
    for chunk in plan.chunks:
        scheduler.live.advance(chunk)
        if chunk.samples:
            scheduler.live.table.add_token(chunk.seq, 1)


def step(scheduler: MixedScheduler) -> list[tuple[str, int, int]]:
    plan = scheduler.schedule()
    compute(scheduler, plan)
    scheduler.live.check_integrity()
    return composition(plan)
