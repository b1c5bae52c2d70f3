"""Several decode steps at once have the effect of one after the other."""

from unittest.mock import PropertyMock, patch

import pytest

from engine.engine import Engine
from sim.cluster import Outcome, SimCluster
from sim.policies import PolicyName
from sim.workload import make_workload
from tests.sim.clusters import settings


def _simulate(policy: PolicyName) -> Outcome:
    shape = settings(workers=3, duration=4.0, num_pages=8_000)
    cluster = SimCluster(shape, policy, make_workload(shape, 12.0))
    outcome = cluster.run()
    for worker in cluster.workers:
        worker.engine.check_integrity()
    return outcome


@pytest.mark.parametrize("policy", ["cpd", "aggregated", "static-pd"])
def test_steps_at_once_and_one_by_one_have_the_same_results(policy: PolicyName) -> None:
    with patch.object(Engine, "fast_forward", autospec=True, side_effect=Engine.fast_forward) as forward:
        at_once = _simulate(policy)
    with patch.object(Engine, "quiet_steps", PropertyMock(return_value=0)):
        one_by_one = _simulate(policy)
    assert sum(len(call.args[1]) for call in forward.call_args_list) > 500
    assert at_once.records == one_by_one.records
    assert at_once.imbalance == one_by_one.imbalance
