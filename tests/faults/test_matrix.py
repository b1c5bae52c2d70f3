"""{prefill worker, decode worker, router, Redis, network} x {what happens} x {when}, with real processes; and the same
of fetches from another decode worker's cache.

A few cells run always; `pytest -m faults tests/faults` (or `make faults`) runs all of them in about a quarter of an
hour. Only a router takes its requests with it.
"""

from collections.abc import AsyncIterator
from itertools import product

import pytest
import pytest_asyncio

from tests.conftest import MakeCheckpoint
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.fetches import FetchPhase, Side, run_fetch_cell
from tests.faults.matrix import Fault, Phase, Subject, run_cell

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

ALWAYS = [
    (Subject.PREFILL, Fault.KILLED, Phase.DURING_PUSH),
    (Subject.PREFILL, Fault.STOPPED, Phase.DURING_PREFILL),
    (Subject.DECODE, Fault.KILLED, Phase.WHILE_DECODING),
    (Subject.REDIS, Fault.RESTARTED, Phase.BEFORE_RESERVE),
    (Subject.NETWORK, Fault.CUT_OFF, Phase.DURING_PUSH),
]
"""At least one for each subject but the router, which tests/e2e kills."""

FETCHED_ALWAYS = (Side.SOURCE, Fault.KILLED, FetchPhase.DURING_PUSH)

CELLS = [
    pytest.param(
        "ucx",
        *cell,
        id="-".join(["ucx", *(part.value for part in cell)]),
        marks=() if cell in ALWAYS else pytest.mark.faults,
    )
    for cell in product(Subject, Fault, Phase)
] + [
    pytest.param("nixl", *cell, id="-".join(["nixl", *(part.value for part in cell)]), marks=pytest.mark.faults)
    for cell in product(
        (Subject.PREFILL, Subject.DECODE, Subject.NETWORK), Fault, (Phase.DURING_PUSH, Phase.AFTER_LAST_PAGE)
    )
]
"""With nixl, where it matters how pages move."""

FETCH_CELLS = [
    pytest.param(
        "ucx",
        *cell,
        id="-".join(["ucx-fetch", *(part.value for part in cell)]),
        marks=() if cell == FETCHED_ALWAYS else pytest.mark.faults,
    )
    for cell in product(Side, Fault, FetchPhase)
]


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(checkpoint: MakeCheckpoint, transport: str) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(checkpoint("qwen3"), transport=transport) as running:
        yield running


@pytest.mark.parametrize(("transport", "subject", "fault", "phase"), CELLS, scope="module")
async def test_every_request_ends_right_and_nothing_is_left(
    transport: str, cluster: FaultCluster, oracle: Oracle, subject: Subject, fault: Fault, phase: Phase
) -> None:
    if cluster.network is None and (subject is Subject.NETWORK or (fault is Fault.CUT_OFF and subject.is_process)):
        pytest.skip("cutting links takes root: network namespaces")
    try:
        ended = await run_cell(cluster, oracle, subject, fault, phase)
    except BaseException:
        cluster.print_logs()
        raise
    if subject is not Subject.ROUTER:  # with whom the connection goes
        assert ended == "right"


@pytest.mark.parametrize(("transport", "side", "fault", "phase"), FETCH_CELLS, scope="module")
async def test_a_fetch_ends_right_and_nothing_is_left(
    transport: str, cluster: FaultCluster, oracle: Oracle, side: Side, fault: Fault, phase: FetchPhase
) -> None:
    if cluster.network is None and fault is Fault.CUT_OFF:
        pytest.skip("cutting links takes root: network namespaces")
    try:
        await run_fetch_cell(cluster, oracle, side, fault, phase)
    except BaseException:
        cluster.print_logs()
        raise
