"""The fault matrix, with real processes: each fault, to each part of the cluster, in each phase.

Every test run includes a few cells; `pytest -m faults tests/faults` and `make acceptance` run all of them in about
half an hour. Only a fault of the request's router may fail the request.
"""

import random
from collections.abc import AsyncIterator, Callable
from itertools import product

import pytest
import pytest_asyncio

from cpd.common.blocks import BLOCK_SIZE
from tests.conftest import MakeCheckpoint
from tests.e2e.client import client, complete
from tests.e2e.oracle import Oracle
from tests.faults.cluster import FaultCluster
from tests.faults.displacement_matrix import (
    FAMILIES,
    FAULTS,
    DisplacementSubject,
    SharedDevice,
    Step,
    run_displacement_cell,
)
from tests.faults.fetch_matrix import FetchPhase, Side, run_fetch_cell
from tests.faults.hang_ups import Waiting, run_hang_up_cell
from tests.faults.matrix import MAX_TOKENS, PROMPT_TOKENS, Fault, Phase, Subject, run_cell
from tests.faults.move_matrix import Cause, MovePhase, MoveSide, run_move_cell

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

IN_EVERY_RUN = [
    (Subject.PREFILL, Fault.KILLED, Phase.DURING_PUSH),
    (Subject.PREFILL, Fault.STOPPED, Phase.DURING_PREFILL),
    (Subject.DECODE, Fault.KILLED, Phase.WHILE_DECODING),
    (Subject.BOTH_WORKERS, Fault.KILLED, Phase.DURING_PREFILL),
    (Subject.REDIS, Fault.RESTARTED, Phase.BEFORE_RESERVE),
    (Subject.NETWORK, Fault.CUT_OFF, Phase.DURING_PUSH),
]
"""At least one cell for each subject except the router, which tests/e2e kills."""

FETCH_IN_EVERY_RUN = (Side.SOURCE, Fault.KILLED, FetchPhase.DURING_PUSH)

CELLS = [
    pytest.param(
        "ucx",
        *cell,
        id="-".join(["ucx", *(part.value for part in cell)]),
        marks=() if cell in IN_EVERY_RUN else pytest.mark.faults,
    )
    for cell in product(Subject, Fault, Phase)
] + [
    pytest.param("nixl", *cell, id="-".join(["nixl", *(part.value for part in cell)]), marks=pytest.mark.faults)
    for cell in product(
        (Subject.PREFILL, Subject.DECODE, Subject.NETWORK), Fault, (Phase.DURING_PUSH, Phase.AFTER_LAST_PAGE)
    )
]
"""All cells with ucx, and with nixl those in which pages move."""

FETCH_CELLS = [
    pytest.param(
        "ucx",
        *cell,
        id="-".join(["ucx-fetch", *(part.value for part in cell)]),
        marks=() if cell == FETCH_IN_EVERY_RUN else pytest.mark.faults,
    )
    for cell in product(Side, Fault, FetchPhase)
]

MOVES_IN_EVERY_RUN = [
    (MoveSide.SOURCE, Fault.KILLED, MovePhase.DURING_PUSH),
    (MoveSide.TARGET, Fault.KILLED, MovePhase.AFTER_LAST_PAGE),
]

MOVE_CELLS = [
    pytest.param(
        transport,
        *cell,
        id="-".join([f"{transport}-move", *(part.value for part in cell)]),
        marks=() if transport == "ucx" and cell in MOVES_IN_EVERY_RUN else pytest.mark.faults,
    )
    for transport in ("ucx", "nixl")
    for cell in product(MoveSide, Fault, MovePhase)
]

SLOW_MOVES = [
    (MoveSide.SOURCE, Fault.KILLED, MovePhase.DURING_PUSH),
    (MoveSide.TARGET, Fault.KILLED, MovePhase.DURING_PUSH),
]
"""A few cells for a worker that is slow: the move itself is the same."""

HANG_UPS = [
    pytest.param(
        transport,
        stage,
        id="-".join([transport, *(["move"] if isinstance(stage, MovePhase) else []), stage.value]),
        marks=() if transport == "ucx" and isinstance(stage, Phase) else pytest.mark.faults,
    )
    for transport in ("ucx", "nixl")
    for stage in (*Waiting, *Phase, *MovePhase)
]


DISPLACEMENTS_IN_EVERY_RUN = [
    (DisplacementSubject.VICTIM, Fault.KILLED, Step.PARKED),
    (DisplacementSubject.WAKER, Fault.KILLED, Step.WAKING),
]

DISPLACEMENTS = [
    pytest.param(
        *cell,
        id="-".join(["displacement", *(part.value for part in cell)]),
        marks=() if cell in DISPLACEMENTS_IN_EVERY_RUN else pytest.mark.faults,
    )
    for cell in product(DisplacementSubject, FAULTS, Step)
]


@pytest.fixture(scope="module")
def oracle(checkpoint: MakeCheckpoint) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(checkpoint: MakeCheckpoint, transport: str) -> AsyncIterator[FaultCluster]:
    async with FaultCluster(checkpoint("qwen3"), transport=transport) as running:
        yield running


@pytest.fixture(scope="module")
def oracles(checkpoint: MakeCheckpoint) -> dict[str, Oracle]:
    """Of the two models that share a device."""
    return {worker: Oracle(checkpoint(family)) for worker, family in FAMILIES.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_device(checkpoint: MakeCheckpoint) -> AsyncIterator[SharedDevice]:
    async with SharedDevice({worker: checkpoint(family) for worker, family in FAMILIES.items()}) as running:
        yield running


@pytest.mark.parametrize(("transport", "subject", "fault", "phase"), CELLS, scope="module")
async def test_requests_end_correctly_and_nothing_leaks(
    transport: str, cluster: FaultCluster, oracle: Oracle, subject: Subject, fault: Fault, phase: Phase
) -> None:
    if cluster.network is None and (subject is Subject.NETWORK or (fault is Fault.CUT_OFF and subject.is_process)):
        pytest.skip("cutting links takes root: network namespaces")
    try:
        outcome = await run_cell(cluster, oracle, subject, fault, phase)
    except BaseException:
        cluster.print_logs()
        raise
    if subject is not Subject.ROUTER:  # the client's connection ends with its router
        assert outcome == "right"


@pytest.mark.parametrize(("transport", "stage"), HANG_UPS, scope="module")
async def test_a_client_that_hangs_up_leaves_no_page_behind(
    transport: str,
    cluster: FaultCluster,
    oracle: Oracle,
    stage: Phase | Waiting | MovePhase,
    record_property: Callable[[str, object], None],
) -> None:
    try:
        took_s = await run_hang_up_cell(cluster, oracle, stage)
    except BaseException:
        cluster.print_logs()
        raise
    record_property(f"until pages were free after a hang-up: {type(stage).__name__} {stage.value}", took_s)


@pytest.mark.parametrize("transport", ["ucx"], scope="module")
async def test_a_restarted_router_knows_the_cached_blocks_again(
    transport: str, cluster: FaultCluster, oracle: Oracle
) -> None:
    """Once it is ready: no request is routed before."""
    (prompt,) = oracle.prompts([PROMPT_TOKENS], random.randrange(1 << 30))
    async with client(cluster.urls["router-0"]) as http:
        await complete(http, prompt, max_tokens=MAX_TOKENS)
    process = cluster.processes["router-0"]
    process.kill()
    process.start()
    await cluster.wait_until_healthy()
    async with client(cluster.urls["router-0"]) as http:
        answer = await complete(http, prompt, max_tokens=MAX_TOKENS)
    assert answer.cached_tokens == PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    oracle.check(prompt, answer.token_ids)


@pytest.mark.parametrize(("transport", "side", "fault", "phase"), FETCH_CELLS, scope="module")
async def test_fetches_end_correctly_and_nothing_leaks(
    transport: str, cluster: FaultCluster, oracle: Oracle, side: Side, fault: Fault, phase: FetchPhase
) -> None:
    if cluster.network is None and fault is Fault.CUT_OFF:
        pytest.skip("cutting links takes root: network namespaces")
    try:
        await run_fetch_cell(cluster, oracle, side, fault, phase)
    except BaseException:
        cluster.print_logs()
        raise


@pytest.mark.parametrize(("transport", "side", "fault", "phase"), MOVE_CELLS, scope="module")
async def test_moves_end_correctly_and_nothing_leaks(
    transport: str, cluster: FaultCluster, oracle: Oracle, side: MoveSide, fault: Fault, phase: MovePhase
) -> None:
    if cluster.network is None and fault is Fault.CUT_OFF:
        pytest.skip("cutting links takes root: network namespaces")
    try:
        outcome = await run_move_cell(cluster, oracle, side, fault, phase)
        # otherwise the client's connection ends with its router
        assert side is MoveSide.ROUTER or outcome == "right"
    except BaseException:
        cluster.print_logs()
        raise


@pytest.mark.parametrize("transport", ["ucx"], scope="module")
@pytest.mark.parametrize(("side", "fault", "phase"), SLOW_MOVES)
async def test_moves_away_from_a_slow_worker_end_correctly_and_nothing_leaks(
    transport: str, cluster: FaultCluster, oracle: Oracle, side: MoveSide, fault: Fault, phase: MovePhase
) -> None:
    try:
        assert await run_move_cell(cluster, oracle, side, fault, phase, Cause.SLOW) == "right"
    except BaseException:
        cluster.print_logs()
        raise


@pytest.mark.parametrize(("subject", "fault", "step"), DISPLACEMENTS)
async def test_displacements_lose_no_stream_and_give_no_memory_twice(
    shared_device: SharedDevice,
    oracles: dict[str, Oracle],
    subject: DisplacementSubject,
    fault: Fault,
    step: Step,
) -> None:
    try:
        outcomes = await run_displacement_cell(shared_device, oracles, subject, fault, step)
    except BaseException:
        shared_device.print_logs()
        raise
    if subject is not DisplacementSubject.ROUTER:  # the client's connections end with their router
        assert outcomes == ["right", "right"]
