"""Loads and fleets for the planner's tests."""

from hypothesis import strategies as st

from cpd.performance.colocation import Colocation
from cpd.performance.model import PerfModel, Profile
from cpd.performance.split import SplitShares
from cpd.planner.capacity import Demand, Fleet, Targets
from cpd.planner.load import Seen

MODEL = PerfModel(Profile.load("h200-qwen3-8b"))
SPLITS = [SplitShares(1 - decode, decode) for decode in (0.12, 0.24, 0.48, 0.76)]
COLOCATION = Colocation(MODEL, mode="auto", splits=SPLITS, itl_ms=50.0)
TARGETS = Targets(slo_ttft=2000.0, slo_itl=50.0)
MANY = Seen(500, 500.0)

CHATS = Demand(rate=40.0, local_tokens=250, remote_tokens=1600, prompt_tokens=2100, output_tokens=300)
LONG = Demand(rate=1.0, local_tokens=20_000, remote_tokens=20_000, prompt_tokens=20_000, output_tokens=250)


def fleet(count: int = 16) -> Fleet:
    """Returns equal workers."""
    return Fleet(count, [COLOCATION], [1.0], max_num_seqs=256, num_pages=MODEL.profile.num_pages)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Any requests."""
    prompt = draw(st.integers(1, 40_000))
    local = draw(st.integers(1, prompt))
    remote = draw(st.integers(local, prompt))
    return Demand(draw(st.floats(0.01, 200)), local, remote, prompt, draw(st.integers(1, 2_000)))
