"""Fast-forwarded steps have the same effect as single ones."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from cpd.common.blocks import extend_hashes
from cpd.performance.model import Work
from engine.types import Request, SamplingParams
from sim.cluster.simulation import Outcome, SimCluster
from sim.cluster.users import ROOT
from sim.cluster.worker import SimWorker
from sim.cluster.workload import make_workload
from sim.device.fast_forward import FastForward
from sim.device.pace import Pace
from sim.events import Events
from tests.sim.clusters import MODEL, prompt, settings


def _simulate(fields: dict[str, Any], schedule: Sequence[tuple[float, int]] = ()) -> tuple[Outcome, list[float]]:
    shape = settings(**fields, workers=3, duration=4.0, num_pages=8_000)
    cluster = SimCluster(shape, make_workload(shape, 12.0), schedule=schedule)
    outcome = cluster.run()
    for worker in cluster.workers:
        worker.engine.check_integrity()
    return outcome, [worker.device_s for worker in cluster.workers]


@pytest.mark.parametrize(
    ("fields", "schedule"),
    [
        ({"policy": "cost"}, ()),
        ({"policy": "sglang"}, ()),
        ({"policy": "static-pd"}, ()),
        ({"policy": "cost", "step_noise": 0.1, "drift": 0.2, "profile_error": 0.3}, ()),
        ({"policy": "cost", "step_noise": 0.1}, [(0.5 * step, step % 3) for step in range(1, 10)]),
    ],
)
def test_fast_forwarded_and_single_steps_have_the_same_results(
    fields: dict[str, Any], schedule: Sequence[tuple[float, int]]
) -> None:
    with patch.object(FastForward, "end", autospec=True, side_effect=FastForward.end) as end:
        at_once, work_s = _simulate(fields, schedule)
    with patch("sim.cluster.worker.possible_steps", return_value=0):
        one_by_one, work_one_by_one_s = _simulate(fields, schedule)
    assert sum(len(call.args[1]) for call in end.call_args_list) > 500
    assert at_once.records == one_by_one.records
    assert at_once.imbalance == one_by_one.imbalance
    assert work_s == pytest.approx(work_one_by_one_s, rel=0.02)  # the last steps may still run


def test_a_command_made_by_another_one_waits_for_one_step() -> None:
    events = Events()
    worker = SimWorker(
        "w", "combined", events, MODEL, Pace(), MODEL, colocate="mixed", token_budget=0, itl_ms=50.0, num_pages=1_000,
        max_model_len=4_096, max_num_seqs=8, max_queue_tokens=100_000,
    )  # fmt: skip
    tokens, at_s = prompt(160), list[float]()
    worker.do(
        lambda engine: engine.add(
            Request("r", tokens, len(tokens), SamplingParams(max_tokens=200), ROOT, extend_hashes(ROOT, tokens))
        )
    )
    events.run(lambda: events.now > 0.1)  # until decoding starts
    worker.do(lambda engine: worker.do(lambda engine: at_s.append(events.now)))
    begin_s = events.now
    events.run(lambda: bool(at_s))
    step_ms = MODEL.step_ms(Work.decode(1, 360))
    assert 1e3 * (at_s[0] - begin_s) <= 2 * step_ms
