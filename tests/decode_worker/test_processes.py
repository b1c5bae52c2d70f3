"""A prefill and a decode worker, or two decode workers, as processes with a real model, UCX and signals."""

import asyncio
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpd.common.blocks import BLOCK_SIZE, extend_hashes, hash_root
from cpd.common.process import EXIT_DRAINED
from cpd.common.settings import Role
from cpd.rpc import cpd_pb2 as pb
from engine.types import Request, SamplingParams
from tests.conftest import MakeCheckpoint
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.processes import ROOT, START_S, TOKEN, WorkerProcess, command, worker_process

pytestmark = pytest.mark.e2e

ROLES: tuple[Role, ...] = ("prefill", "combined")
FLAGS = {"kv_memory": "32MiB", "lease_s": 1, "prefill_progress_s": 3, "kv_checksum": True}
TENANT = hash_root(b"one tenant")


@dataclass
class Cluster:
    """One worker of each kind and a session with each."""

    prefill: WorkerProcess
    decode: WorkerProcess
    router: Client
    prefill_view: Client

    async def submit(self, request: Request, number: int) -> Answer:
        """Submits with the prefill worker as candidate."""
        return await self.router.submit(request, number, candidates=[self.prefill.candidate])


@asynccontextmanager
async def cluster(
    model: Path, redis_url: str, directory: Path, own: Sequence[Mapping[str, Any]] = ({}, {}), **flags: Any
) -> AsyncIterator[Cluster]:
    """`own`: more flags, of the prefill and of the decode worker."""
    given = {**FLAGS, "model": model, "cluster": directory.name, **flags}
    async with AsyncExitStack() as stack:
        prefill, decode = await asyncio.gather(
            *(
                stack.enter_async_context(worker_process(role, redis_url, directory, worker_id=role, **given, **flags))
                for role, flags in zip(ROLES, own, strict=True)
            )
        )
        router = await stack.enter_async_context(Client(decode, token=TOKEN))
        prefill_view = await stack.enter_async_context(Client(prefill, token=TOKEN))
        yield Cluster(prefill, decode, router, prefill_view)


@pytest.fixture(scope="module")
def model(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("qwen3")


def request(name: str, length: int, *, seed: int = 0, salt: int = 0, n: int = 1, max_tokens: int = 16) -> Request:
    """A prompt of random tokens; with a seed, sampled at temperature 1."""
    tokens = random.Random(salt * 10_000 + length)
    token_ids = [tokens.randrange(3, 400) for _ in range(length)]
    root = hash_root(TENANT, str(salt).encode())
    params = SamplingParams(temperature=1.0 if seed else 0.0, seed=seed, max_tokens=max_tokens)
    return Request(name, token_ids, length, params, root, extend_hashes(root, token_ids), n=n)


def with_own_cache(request: Request) -> Request:
    """The same request of another tenant, for which nothing is cached."""
    root = hash_root(b"another tenant")
    return Request(
        request.id,
        request.token_ids,
        request.prompt_len,
        request.params,
        root,
        extend_hashes(root, request.token_ids),
        n=request.n,
    )


async def test_both_routes_give_the_same_tokens(model: Path, redis_url: str, tmp_path: Path) -> None:
    requests = [
        request(f"r{i}", length, seed=seed, salt=i, n=1 + i % 2)
        for i, (length, seed) in enumerate([(40, 0), (100, 7), (511, 0), (512, 3), (513, 0), (900, 5), (1500, 0)])
    ]
    async with cluster(model, redis_url, tmp_path, dtype="float32", prefill_progress_s=60) as c:
        remote = [await c.submit(r, i) for i, r in enumerate(requests)]
        await c.router.done(*remote)
        local = [await c.router.submit(with_own_cache(r), 100 + i) for i, r in enumerate(requests)]
        await c.router.done(*local)
        for there, here in zip(remote, local, strict=True):
            assert {p.prefill_worker for p in there.prefilled.values()} == {"prefill"}
            assert {p.prefill_worker for p in here.prefilled.values()} == {""}
            assert there.tokens == here.tokens
            assert there.finish == here.finish
        await c.router.balanced()
        await c.prefill_view.balanced()
        await eventually(lambda: c.router.load.remote_prefills == {"completed": len(requests)})


async def test_after_a_sleep_pages_move_over_a_new_transport(model: Path, redis_url: str, tmp_path: Path) -> None:
    # On one machine two workers of one model would not share its device.
    own = [{"served_model_name": name} for name in ("one", "another")]
    flags: dict[str, Any] = {"dtype": "float32", "prefill_progress_s": 60, "device_memory": "1GiB"}
    async with cluster(model, redis_url, tmp_path, own, **flags) as c:
        for number, view in enumerate((c.router, c.prefill_view)):
            before = await c.submit(request("before", 900, salt=number), number)
            await c.router.done(before)
            await view.administer("Sleep")
            await eventually(lambda: view.load.residency.state == pb.Residency.STATE_ASLEEP)  # noqa: B023
            await view.administer("Wake")
            await eventually(lambda: view.load.residency.state == pb.Residency.STATE_SERVING)  # noqa: B023
            after = await c.submit(with_own_cache(request("after", 900, salt=number)), 10 + number)
            await c.router.done(after)
            assert after.prefilled[0].prefill_worker == "prefill"
            assert after.tokens == before.tokens
        await c.router.balanced()
        await c.prefill_view.balanced()


async def test_workers_take_nixl_by_default_and_say_why(model: Path, redis_url: str, tmp_path: Path) -> None:
    async with cluster(model, redis_url, tmp_path, dtype="float32", prefill_progress_s=60) as c:
        for hello in (c.router.hello, c.prefill_view.hello):
            assert hello.transport == "nixl", hello.transport_reason
            assert "through memory between processes of one machine" in hello.transport_reason
        wanted = request("r", 900)
        there = await c.submit(wanted, 1)
        here = await c.router.submit(with_own_cache(wanted), 2)
        await c.router.done(there, here)
        assert there.prefilled[0].prefill_worker == "prefill"
        assert there.tokens == here.tokens
        await c.router.balanced()


@pytest.mark.parametrize("transports", [("ucx", "nixl"), ("nixl", "ucx")], ids=["ucx to nixl", "nixl to ucx"])
async def test_workers_with_different_transports_prefill_for_each_other(
    model: Path, redis_url: str, tmp_path: Path, transports: tuple[str, str]
) -> None:
    own = [{"transport": name} for name in transports]
    async with cluster(model, redis_url, tmp_path, own, dtype="float32", prefill_progress_s=60) as c:
        assert (c.prefill_view.hello.transport, c.router.hello.transport) == transports
        requests = [request(f"r{i}", 900, salt=i, seed=i) for i in range(4)]
        remote = [await c.submit(each, number) for number, each in enumerate(requests)]
        local = [await c.router.submit(with_own_cache(each), 100 + number) for number, each in enumerate(requests)]
        await c.router.done(*remote, *local)
        for there, here in zip(remote, local, strict=True):
            assert there.prefilled[0].prefill_worker == "prefill"
            assert there.tokens == here.tokens
        await c.router.balanced()
        await c.prefill_view.balanced()
        await eventually(lambda: c.router.load.remote_prefills == {"completed": len(requests)})


@pytest.mark.parametrize("transports", [("ucx", "nixl"), ("nixl", "ucx")], ids=["ucx to nixl", "nixl to ucx"])
async def test_workers_with_different_transports_fetch_prefixes_from_each_other(
    model: Path, redis_url: str, tmp_path: Path, transports: tuple[str, str]
) -> None:
    length, cached = 900, 900 // BLOCK_SIZE * BLOCK_SIZE
    given: dict[str, Any] = {**FLAGS, "model": model, "cluster": tmp_path.name, "prefill_progress_s": 60}
    async with AsyncExitStack() as stack:
        workers = (
            worker_process("combined", redis_url, tmp_path, worker_id=name, dtype="float32", transport=kind, **given)
            for name, kind in zip(("source", "here"), transports, strict=True)
        )
        source, here = await asyncio.gather(*(stack.enter_async_context(worker) for worker in workers))
        there = await stack.enter_async_context(Client(source, token=TOKEN))
        router = await stack.enter_async_context(Client(here, token=TOKEN))
        hint = pb.PrefixSource(worker_id="source", address=source.session, blocks=length // BLOCK_SIZE)
        wanted = request("r", length, seed=3)
        reference = await there.submit(wanted, 1)
        await there.done(reference)
        answer = await router.submit(wanted, 2, prefix_source=hint)
        await router.done(answer)
        assert answer.prefilled[0] == pb.Prefilled(cached_tokens=cached, prefix_worker="source")
        assert answer.tokens == reference.tokens
        await router.balanced()
        await there.balanced()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
async def test_a_prefix_from_another_decode_workers_cache_changes_no_answer(
    model: Path, redis_url: str, tmp_path: Path, transport: str
) -> None:
    """The other worker runs, is stopped, continues, and is killed."""
    length, cached = 900, 900 // BLOCK_SIZE * BLOCK_SIZE
    given: dict[str, Any] = {**FLAGS, "model": model, "cluster": tmp_path.name, "transport": transport}
    given["prefill_progress_s"] = 60
    async with AsyncExitStack() as stack:
        workers = (
            worker_process("combined", redis_url, tmp_path, worker_id=name, dtype="float32", **given)
            for name in ("source", "here")
        )
        source, here = await asyncio.gather(*(stack.enter_async_context(worker) for worker in workers))
        there = await stack.enter_async_context(Client(source, token=TOKEN))
        router = await stack.enter_async_context(Client(here, token=TOKEN))
        hint = pb.PrefixSource(worker_id="source", address=source.session, blocks=length // BLOCK_SIZE)
        prompts = [request(f"r{salt}", length, salt=salt, seed=salt % 2) for salt in range(4)]
        references = [await there.submit(one, number) for number, one in enumerate(prompts)]
        await there.done(*references)

        async def ask(number: int) -> Answer:
            answer = await router.submit(prompts[number], number, prefix_source=hint)
            await router.done(answer)
            assert answer.tokens == references[number].tokens
            await router.balanced()
            return answer

        assert (await ask(0)).prefilled[0] == pb.Prefilled(cached_tokens=cached, prefix_worker="source")
        await there.balanced()
        source.signal(signal.SIGSTOP)
        assert (await ask(1)).prefilled[0] == pb.Prefilled()
        source.signal(signal.SIGCONT)
        await ask(2)  # the connection may be broken now
        await there.balanced()
        source.signal(signal.SIGKILL)
        assert (await ask(3)).prefilled[0] == pb.Prefilled()
        again = await router.submit(with_own_cache(prompts[0]), 9)
        await router.done(again)
        assert again.tokens == references[0].tokens


async def test_prefill_workers_are_killed_one_after_another(model: Path, redis_url: str, tmp_path: Path) -> None:
    async with cluster(model, redis_url, tmp_path) as c:
        await _killed(c, c.prefill, 100, lambda answer: True)
        given: dict[str, Any] = {**FLAGS, "model": model, "cluster": tmp_path.name}
        async with worker_process("prefill", redis_url, tmp_path, worker_id="second", **given) as second:
            await _killed(c, second, 200, lambda answer: answer.started)
        async with worker_process("prefill", redis_url, tmp_path, worker_id="third", **given) as third:
            await _killed(c, third, 300, lambda answer: len(answer.tokens.get(0, ())) > 5)


async def _killed(c: Cluster, prefill: WorkerProcess, number: int, far_enough: Callable[[Answer], bool]) -> None:
    """Kills `prefill` when one of several long requests is far enough; all requests must end."""
    answers = [
        await c.router.submit(
            request(f"r{i}", 1200, salt=number + i, max_tokens=60), number + i, candidates=[prefill.candidate]
        )
        for i in range(8)
    ]
    await eventually(lambda: any(far_enough(answer) for answer in answers))
    prefill.signal(signal.SIGKILL)
    await c.router.done(*answers)
    assert {answer.refusal.kind for answer in answers if answer.refusal} <= {pb.Refusal.KIND_REROUTE}
    short = await c.router.submit(request("short", 20, salt=number), number + 50, candidates=[prefill.candidate])
    await c.router.done(short)
    assert short.refusal is None
    await c.router.balanced()


@pytest.mark.parametrize("transport", ["ucx", "nixl"])
async def test_the_prefill_worker_is_stopped_and_goes_on(
    model: Path, redis_url: str, tmp_path: Path, transport: str
) -> None:
    """Its late writes after it continues must not change any answer."""
    async with cluster(model, redis_url, tmp_path, transport=transport) as c:
        wanted = request("again", 900, salt=77, max_tokens=30)
        reference = await c.router.submit(with_own_cache(wanted), 1)
        await c.router.done(reference)
        answers = [await c.submit(request(f"r{i}", 1200, salt=i, max_tokens=60), 10 + i) for i in range(8)]
        await eventually(lambda: any(answer.started for answer in answers))
        c.prefill.signal(signal.SIGSTOP)
        late = await c.submit(request("late", 1200, salt=8, max_tokens=60), 20)
        await c.router.done(*answers, late)
        assert late.refusal is not None
        if transport == "ucx":
            await c.router.balanced()
        else:  # it writes into this pool's memory when it continues, and nothing can stop that
            await eventually(lambda: not (c.router.load.running or c.router.load.waiting))
            assert c.router.load.reserved_pages == c.router.load.used_pages == 0
        c.prefill.signal(signal.SIGCONT)
        for number in range(100, 106):
            answer = await c.submit(request("again", 900, salt=77, max_tokens=30), number)
            await c.router.done(answer)
            if answer.refusal is None:
                assert answer.tokens == reference.tokens
        await c.router.balanced()
        await c.prefill_view.balanced()


async def test_the_decode_worker_is_killed(model: Path, redis_url: str, tmp_path: Path) -> None:
    async with cluster(model, redis_url, tmp_path) as c:
        for i in range(8):
            await c.submit(request(f"r{i}", 1200, salt=i, max_tokens=60), i)
        await eventually(lambda: any(answer.started for answer in c.router.answers.values()))
        c.decode.signal(signal.SIGKILL)
        await eventually(lambda: c.router.broken is not None)
        await c.prefill_view.balanced()
        async with (
            worker_process(
                "combined", redis_url, tmp_path, worker_id="next", cluster="next", model=model, kv_memory="32MiB"
            ) as d,
            Client(d, token=TOKEN) as router,
        ):
            answer = await router.submit(request("a", 600, salt=99), 1, candidates=[c.prefill.candidate])
            await router.done(answer)
            assert answer.prefilled[0].prefill_worker == "prefill"


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["sigint", "sigterm-twice"]
)
async def test_a_worker_ends_at_once_and_its_requests_go_elsewhere(
    model: Path, redis_url: str, tmp_path: Path, signals: list[signal.Signals]
) -> None:
    async with cluster(model, redis_url, tmp_path) as c:
        answer = await c.submit(request("a", 600, n=8, max_tokens=1000), 1)
        await eventually(lambda: answer.started)
        if len(signals) > 1:
            c.decode.signal(signals[0])
            await eventually(lambda: "draining: got SIGTERM" in c.decode.log.read_text())
            assert answer.refusal is None
        c.decode.signal(signals[-1])
        for number in signals:
            c.prefill.signal(number)
        assert (await c.decode.ended(), await c.prefill.ended()) == (0, 0)
        await c.router.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_REROUTE


@pytest.mark.parametrize("on_request", [True, False], ids=["cpd-drain", "sigterm"])
async def test_a_draining_process_ends_when_its_work_is_done(
    model: Path, redis_url: str, tmp_path: Path, on_request: bool
) -> None:
    async with cluster(model, redis_url, tmp_path) as c:
        answer = await c.submit(request("a", 600, max_tokens=200), 1)
        await eventually(lambda: answer.started)
        if on_request:
            await c.router.drain()
        else:
            c.decode.signal(signal.SIGTERM)
        await c.router.done(answer)
        assert len(answer.tokens[0]) == 200
        assert await c.decode.ended() == (EXIT_DRAINED if on_request else 0)


def test_a_worker_that_cannot_start_says_why_in_one_sentence(model: Path, redis_url: str) -> None:
    given = {"model": model, "redis_url": redis_url, "max_model_len": 1_000_000, "log_level": "error"}
    result = subprocess.run(command("combined", **given), cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: --max-model-len 1000000 is over the checkpoint's limit")
