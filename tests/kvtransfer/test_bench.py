"""`cpd bench transfer`, between real processes."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil
import pytest
from pydantic import ByteSize

from cpd.common.errors import TransferError
from kvtransfer.base import Cost
from kvtransfer.bench import receiver
from kvtransfer.bench.measure import measure
from kvtransfer.bench.pool import BenchPool, choose
from kvtransfer.bench.result import Cell, Push, TransferResult
from kvtransfer.bench.settings import TransferBenchSettings
from tests.kvtransfer import fake_gpu
from tests.kvtransfer.remote import START_S


def settings(**changed: object) -> TransferBenchSettings:
    few: dict[str, object] = {"pages": [1, 8], "page_size": [ByteSize(4096)], "pool": ByteSize(1 << 20), "repeats": 2}
    return TransferBenchSettings.load(few | {"transport": "ucx", "perftest": False} | changed)


def result(cells: Sequence[Cell]) -> TransferResult:
    return TransferResult(
        schema="cpd-bench-transfer/1", transport="ucx", route="network", machine="", ceiling="", cells=tuple(cells)
    )


def cell(num_bytes: int, ms: float, ceilings: tuple[float, ...] = ()) -> Cell:
    pushes = tuple(Push(ms=ms * factor, sender_cpu_ms=2.0, receiver_cpu_ms=1.0) for factor in (0.5, 1.0, 3.0))
    return Cell(page_bytes=num_bytes, pages=1, scattered=True, pushes=pushes, ceilings=ceilings)


async def test_every_kind_of_push_is_measured() -> None:
    shares: list[float] = []
    async with asyncio.timeout(START_S):
        found = await measure(settings(scatter="both"), lambda _, share: shares.append(share))
    assert [(one.pages, one.scattered) for one in found.cells] == [(1, True), (1, False), (8, True), (8, False)]
    assert all(len(one.pushes) == 2 and one.ceilings == () for one in found.cells)
    assert (found.transport, found.route) == ("ucx", "network")
    assert shares[-1] == 1.0


async def test_transports_that_differ_are_measured() -> None:
    async with asyncio.timeout(START_S):
        found = await measure(settings(transport="nixl", receiver_transport="ucx", route="network"), lambda *_: None)
    assert (found.transport, found.route) == ("nixl to ucx", "network")


@asynccontextmanager
async def receiver_process(*command: str) -> AsyncIterator[str]:
    """Starts a receiver and yields where it listens. It must end with code 0 when the sender disconnects."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, "127.0.0.1", "0", stdout=pipe)
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().partition(receiver.READY)[2].strip()
    finally:
        assert await process.wait() == 0


def receiver_with_gpus() -> AbstractAsyncContextManager[str]:
    serve = "asyncio.run(kvtransfer.bench.receiver.serve(sys.argv[1], int(sys.argv[2])))"
    setup = "import pytest, asyncio, sys, kvtransfer.bench.receiver, tests.kvtransfer.fake_gpu as fake_gpu"
    return receiver_process("-c", f"{setup}; fake_gpu.install(pytest.MonkeyPatch()); {serve}")


async def test_a_receiver_on_another_host_is_used() -> None:
    async with asyncio.timeout(START_S), receiver_process("-m", "kvtransfer.bench.receiver") as where:
        found = await measure(settings(pages=[2], connect=where), lambda *_: None)
    assert "receiver: " in found.machine


@pytest.mark.nixl
async def test_pages_of_one_gpu_go_to_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    async with asyncio.timeout(START_S), receiver_with_gpus() as where:
        found = await measure(settings(transport="auto", device="cuda", connect=where), lambda *_: None)
    assert [one.pages for one in found.cells] == [1, 8]
    assert (found.transport, found.route) == ("nixl", "memory")


@pytest.mark.nixl
async def test_a_route_that_pages_do_not_take_is_not_measured_as_if_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)
    async with asyncio.timeout(START_S), receiver_with_gpus() as where:
        with pytest.raises(TransferError, match="by another route"):
            await measure(settings(transport="nixl", device="cuda", route="network", connect=where), lambda *_: None)


async def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(TransferError, match="nvidia-smi"):
        await measure(settings(transport="auto", device="cuda"), lambda *_: None)


async def test_a_receiver_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TransferError, match="--listen"):
        await measure(settings(connect="127.0.0.1:1"), lambda *_: None)


async def test_a_receiver_that_does_not_start_is_an_error_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.bench.measure._START_S", 0.01)
    before = set(psutil.Process().children())  # of other tests
    with pytest.raises(TransferError, match="did not start"):
        await measure(settings(), lambda *_: None)
    assert set(psutil.Process().children()) <= before


def test_pages_that_arrived_wrong_are_noticed() -> None:
    pool = BenchPool(4, 4096)
    with pytest.raises(TransferError, match="damaged"):
        pool.check_and_clear([1, 2], content=1)
    BenchPool(4, 4096, content=1).check_and_clear([1, 2], content=1)


def test_contiguous_pages_are_chosen_side_by_side() -> None:
    pages = choose(64, 8, scattered=False)
    assert pages == list(range(pages[0], pages[0] + 8))
    assert len(set(choose(64, 64, scattered=True))) == 64


def test_a_share_compares_medians_and_bests() -> None:
    one = cell(1_000_000, 1.0, ceilings=(1e9, 2e9, 4e9))
    assert one.bytes_per_s == pytest.approx(1e9)
    assert one.median_share == pytest.approx(0.5)
    assert one.best_share == pytest.approx(0.5)
    assert cell(1, 1.0).median_share is None
    assert one.cpu_us_per_page == (2000.0, 1000.0)


def test_the_cost_of_a_transfer_is_a_line_through_the_medians() -> None:
    cost = result([cell(size, 0.5 + size / 1e6) for size in (1_000, 1_000_000, 50_000_000)]).cost()
    assert cost.fixed_ms == pytest.approx(0.5)
    assert cost.bytes_per_ms == pytest.approx(1e6)


def test_without_two_sizes_the_cost_is_all_bandwidth() -> None:
    assert result([cell(1_000_000, 2.0)]).cost() == Cost(0.0, 500_000.0)
