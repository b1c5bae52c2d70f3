"""Any figures from a worker are a protocol error, or give finite predictions."""

import math
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cpd.common.policy_settings import PolicySettings
from cpd.rpc import cpd_pb2 as pb
from router.checks import ProtocolError, check_hello, check_load
from router.placement.candidate import NOMINAL
from router.placement.cost_policy import CostPolicy
from router.placement.learning import RoleErrors, WorkerErrors
from router.placement.policy import Prompt
from router.placement.worker_load import WorkerLoad
from router.prefix_index.index import Prefixes
from tests.router.arbitrary import anything, corrupt
from tests.router.placement.situations import situation

WHOLE = NOMINAL.profile.shares[0]
TWO_SHARES = NOMINAL.profile.model_copy(update={"shares": (WHOLE.model_copy(update={"share": 0.5}), WHOLE)})
HELLO = pb.Hello(
    worker_id="bad", state=pb.STATE_READY, num_pages=100, page_bytes=4096, colocate="auto", decode_shares=[0.25, 0.5]
)
LOAD = pb.Load(state=pb.STATE_READY, running=3, decodes=2, decode_context=500, prefill_ms=40.0, free_pages=50)

randoms = st.randoms(use_true_random=False)
prompts = st.builds(
    Prompt,
    tokens=st.sampled_from([1, 17, 4096, 1 << 20]),
    output_tokens=st.sampled_from([1, 1 << 20]),
    choices=st.sampled_from([1, 128]),
)


def _place(hello: pb.Hello, load: pb.Load, prompt: Prompt) -> None:
    """Predicts for a worker that reports these figures, and a usual one."""
    try:
        check_hello(hello)
        estimate = WorkerLoad(hello, "bad:1", itl_ms=50.0, errors=WorkerErrors(RoleErrors()))
        estimate.on_report(load, 1.0)
    except ProtocolError:
        event("protocol error")
        return
    bad = estimate.candidate
    good = WorkerLoad(
        pb.Hello(worker_id="good", num_pages=100), "good:1", itl_ms=50.0, errors=WorkerErrors(RoleErrors())
    ).candidate
    for prefill in ([], [bad], [good]):
        for cached in (Prefixes(), Prefixes({"bad": 3}), Prefixes({"bad": 3}, {"bad": 1}), Prefixes({"good": 3})):
            placement = CostPolicy(PolicySettings()).place(situation(prompt, [bad, good], prefill, cached, now=1.0))
            for option in placement.options:
                assert all(map(math.isfinite, (option.ttft_ms, option.itl_ms, option.cost_ms, *option.cost))), option


@settings(max_examples=300, deadline=None)
@given(randoms, prompts)
def test_any_hello_and_load_give_finite_predictions_or_a_protocol_error(rng: Random, prompt: Prompt) -> None:
    _place(anything(HELLO, rng, but=["worker_id"]), anything(LOAD, rng), prompt)


@settings(max_examples=300, deadline=None)
@given(randoms, st.sampled_from(["mixed", "lanes", "auto"]), st.integers(0, (1 << 32) - 1), prompts)
def test_any_profile_with_maximum_load_gives_finite_predictions_or_a_protocol_error(
    rng: Random, colocate: str, token_budget: int, prompt: Prompt
) -> None:
    hello = pb.Hello(
        worker_id="bad",
        profile=corrupt(TWO_SHARES, rng),
        colocate=colocate,
        decode_shares=[0.25, 0.001],
        token_budget=token_budget,
        num_pages=1 << 24,
        page_bytes=(1 << 64) - 1,
    )
    _place(hello, pb.Load(running=1 << 24, waiting=1 << 24, decodes=1 << 24, decode_context=1 << 40), prompt)


@pytest.mark.parametrize(
    "load",
    [
        {"prefill_ms": -1.0},
        {"prefill_ms": math.nan},
        {"overdue_ms": 40.5},
        {"overdue_ms": -1.0},
        {"step_ms": math.inf},
        {"slowdown": math.nan},
        {"slowdown": -1.0},
        {"slowdown": 1e9},
        {"running": 1 << 25},
        {"decodes": 1 << 25},
        {"decode_context": 1 << 41},
    ],
)
def test_a_load_out_of_range_is_a_protocol_error(load: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        check_load(pb.Load(**load))


@pytest.mark.parametrize("host_page_ms", [-1.0, math.nan, math.inf])
def test_an_impossible_host_memory_load_time_is_a_protocol_error(host_page_ms: float) -> None:
    with pytest.raises(ProtocolError, match="loading a page from host memory takes"):
        check_hello(pb.Hello(state=pb.STATE_READY, host_page_ms=host_page_ms))
