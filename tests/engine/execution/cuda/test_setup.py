"""The whole CUDA back end on a CPU: real model, ops, graphs and lanes over fakes of torch.cuda, FlashInfer,
the Triton kernels and the driver. It must compute the same tokens as the CPU runner."""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import engine.ops
from cpd.common.blocks import extend_hashes, hash_root
from engine.batch import Batch
from engine.execution.cuda import piecewise, setup, warm_up
from engine.execution.cuda.driver import CudaError, CudaUnavailableError
from engine.execution.cuda.host_memory import CudaHostMemory
from engine.execution.cuda.setup import CudaLanes, make_lanes
from engine.execution.executor import Lane, Split
from engine.execution.memory_plan import plan_memory
from engine.execution.runner import TorchRunner
from engine.execution.sampling.sampler import Sampler
from engine.model.config import load_config
from engine.model.decoder import Decoder
from engine.model.weights import Checkpoint
from engine.ops.base import Heads, Ops
from engine.ops.flashinfer_ops import FlashInferOps
from engine.ops.torch_ops import TorchOps
from engine.types import Request, SamplingParams
from tests.conftest import MakeCheckpoint
from tests.engine.execution.cuda.fake_cuda import FakeGraph, FakeStream, cuda
from tests.engine.execution.cuda.fakes import FakeDriver
from tests.engine.ops import fake_flashinfer, fake_kernels
from tests.engine.paging import Pager
from tests.engine.test_lanes_model import Arrival, serve

__all__ = ["cuda"]

CPU = torch.device("cpu")
LONGEST = 300
NUM_PAGES = 80


@dataclass
class FakeGpuRunner:
    """See `engine.execution.executor.Executor`."""

    lanes: CudaLanes
    num_pages: int
    vocab_size: int
    pool: torch.Tensor
    progress: list[tuple[str, float]]

    @property
    def full(self) -> Lane:
        return self.lanes.full

    @property
    def splits(self) -> Sequence[Split]:
        return self.lanes.splits

    def copy_page(self, source: int, target: int) -> None:
        self.lanes.copies.copy(source, target)

    def settle(self) -> None:
        self.lanes.copies.settle()


@pytest.fixture(scope="module")
def directory(checkpoint: MakeCheckpoint) -> Path:
    return checkpoint("qwen3", head_dim=64)


@pytest.fixture(scope="module")
def reference(directory: Path) -> TorchRunner:
    """The CPU runner."""
    kv_bytes = NUM_PAGES * load_config(directory).page_bytes("float32")
    return TorchRunner(directory, dtype="float32", device="cpu", kv_bytes=kv_bytes, max_model_len=LONGEST)


Start = Callable[..., FakeGpuRunner]


@pytest.fixture
def start(cuda: None, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Start:
    """Makes a runner."""
    monkeypatch.setattr(engine.ops, "triton_kernels", fake_kernels, raising=False)
    monkeypatch.setattr(setup, "CudaDriver", FakeDriver)
    monkeypatch.setattr(setup, "_PREFILL_TOKENS", 40)
    monkeypatch.setattr(setup, "_MIXED_TOKENS", 20)

    def make(max_decodes: int = 4, flashinfer: bool = True, split: bool = True) -> FakeGpuRunner:
        config = load_config(directory)
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        ops: Ops = TorchOps()
        if flashinfer:
            ops = FlashInferOps(fake_flashinfer, heads, torch.float32, CPU, fake_flashinfer.SMS, max_decodes)
        progress: list[tuple[str, float]] = []
        with torch.inference_mode(), Checkpoint(directory) as checkpoint:
            kv_bytes = NUM_PAGES * config.page_bytes("float32")
            config = plan_memory(config, checkpoint, dtype="float32", max_model_len=LONGEST).in_pool(kv_bytes)[0]
            model = Decoder(config, checkpoint, ops, torch.float32, CPU, lambda _: None)
        pool = torch.zeros(NUM_PAGES + 1, *config.page_shape("float32"))
        lanes = make_lanes(
            model,
            ops,
            Sampler(config.vocab_size),
            pool,
            max_model_len=config.max_model_len,
            max_decodes=max_decodes,
            split=split,
            on_progress=lambda what, fraction: progress.append((what, fraction)),
        )
        return FakeGpuRunner(lanes, NUM_PAGES, config.vocab_size, pool[:NUM_PAGES], progress)

    return make


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(480), k=length)


def graphs_of(lane: Lane) -> dict[int, FakeGraph]:
    """Returns the captured decodes of a lane by size."""
    return {size: graph.graph for size, graph in lane._step._decodes._graphs.items()}  # type: ignore[attr-defined]


def pieces_of(step: Any) -> dict[int, list[FakeGraph]]:
    """Returns the captured pieces of a lane's step by number of tokens."""
    pieces: dict[int, list[FakeGraph]] = step._prompts._graphs
    return pieces


def test_decodes_and_prompts_replay_graphs(start: Start, reference: TorchRunner) -> None:
    runner = start()
    outputs = []
    for pager in (Pager(reference, seed=1), Pager(runner, seed=2)):
        sequences = [pager.start(prompt_of(length)) for length in (3, 50, 17, 33, 16)]
        for sequence in sequences:  # each joins the step of the others, so some steps are mixed
            running = [(other, other.remaining) for other in sequences if other.output]
            pager.step([*running, (sequence, sequence.remaining)])
        for count in (5, 4, 3, 2, 1, 3, 5) * 2:
            pager.step([(sequence, 1) for sequence in sequences[:count]])
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert {size: graph.replays for size, graph in graphs_of(runner.full).items()} == {1: 2, 2: 2, 4: 6}
    pieces = pieces_of(runner.full._step)  # type: ignore[attr-defined]
    assert {len(graphs) for graphs in pieces.values()} == {3}  # one per layer
    replays = {size: [graph.replays for graph in graphs] for size, graphs in pieces.items()}
    # 5 decodes are more than the largest graph of decodes; the prompt of 50 and the warm-up's 40 tokens take 64
    assert {size: counts for size, counts in replays.items() if any(counts)} == {
        16: [5] * 3,
        32: [2] * 3,
        64: [3] * 3,
    }


def test_a_step_larger_than_every_graph_runs_eagerly(
    start: Start, reference: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piecewise, "SIZES", (16, 32))
    monkeypatch.setattr(setup, "SIZES", (16, 32))
    outputs = []
    runner = start()
    for pager in (Pager(reference), Pager(runner)):
        sequence = pager.start(prompt_of(100))
        outputs.append([*pager.generate(sequence, 3, chunk=60), *pager.generate(pager.start(prompt_of(33)), 2)])
    assert outputs[0] == outputs[1]
    replays = [graph.replays for graph in pieces_of(runner.full._step)[32]]  # type: ignore[attr-defined]
    assert not any(replays)


def test_the_prefill_lane_replays_the_pieces_of_prompts(start: Start, reference: TorchRunner) -> None:
    """Chunks without a sampled token end after the last keys and values."""
    expected = Pager(reference)
    runner = start()
    pager, lane = Pager(cast(TorchRunner, runner)), runner.splits[1].prefill
    sequence = pager.start(prompt_of(150))
    for chunk in (60, 17, 73):
        done = threading.Event()
        lane.launch(pager.batch([(sequence, chunk)]), done.set)
        assert done.wait(20)
        sampled = lane.collect().sampled
    assert [token.token_id for token in sampled] == expected.generate(expected.start(prompt_of(150)), 1)


def test_a_step_of_decodes_may_sample_some_of_its_rows(start: Start, reference: TorchRunner) -> None:
    """Chunks of one token run as decodes; only the last one samples."""
    outputs = []
    for pager in (Pager(reference), Pager(start())):
        first, second = pager.start(prompt_of(4)), pager.start(prompt_of(7))
        for _ in range(5):
            pager.step([(second, 1), (first, 1)])
        outputs.append((first.output, pager.generate(second, 4, chunk=1)))
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0]) == 2


def test_lanes_at_the_same_time_give_the_same_tokens(start: Start, reference: TorchRunner) -> None:
    root = hash_root(b"model")
    arrivals = []
    for number, length in enumerate((9, 150, 70, 16, 200, 33)):
        tokens = prompt_of(length)
        params = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=20 + number, top_logprobs=2)
        request = Request(f"r{number}", tokens, length, params, root, extend_hashes(root, tokens), n=1 + number % 3)
        arrivals.append(Arrival(request, 3 * number, -1, None))
    runner = start(max_decodes=8)
    assert [round(split.decode.share, 2) for split in runner.splits] == [0.12, 0.24, 0.48]
    want = serve(reference, "mixed", arrivals)
    got = serve(cast(TorchRunner, runner), "lanes", arrivals)
    assert {key: [o.token_ids for o in outputs] for key, outputs in want.items()} == {
        key: [o.token_ids for o in outputs] for key, outputs in got.items()
    }
    assert any(graph.replays for graph in graphs_of(runner.splits[0].decode).values()) or any(
        graph.replays for split in runner.splits[1:] for graph in graphs_of(split.decode).values()
    )


def test_pages_come_back_from_pinned_memory(start: Start, reference: TorchRunner) -> None:
    """Pages are copied out on the stream of page copies; copies back wait for its event on another stream."""
    root, arrivals = hash_root(b"model"), []
    for number in range(16):
        tokens = prompt_of(200 + number % 8)
        params = SamplingParams(temperature=0.0, max_tokens=4)
        request = Request(f"r{number}", tokens, len(tokens), params, root, extend_hashes(root, tokens))
        arrivals.append(Arrival(request, 40 * number, -1, None))
    runner = start()
    slots = torch.zeros(120, *runner.pool.shape[1:])
    host = CudaHostMemory(runner.pool, slots, runner.lanes.copies, checksums=True)
    waits: list[object] = host._stream.waits  # type: ignore[attr-defined]
    waits.clear()
    want = serve(reference, "mixed", arrivals)
    got = serve(cast(TorchRunner, runner), "lanes", arrivals, host=host)
    assert {key: [o.token_ids for o in outputs] for key, outputs in want.items()} == {
        key: [o.token_ids for o in outputs] for key, outputs in got.items()
    }
    assert slots.any()
    assert waits
    assert set(waits) == {runner.lanes.copies.done}
    cached = [outputs[0].cached_tokens for outputs in got.values()]
    assert cached == 8 * [0] + 8 * [192]


@pytest.mark.parametrize("max_decodes", [0, 4])
def test_steps_with_token_ids_from_the_device_give_the_same_tokens(
    start: Start, reference: TorchRunner, max_decodes: int
) -> None:
    """With padded graphs and without graphs. Some rows end earlier than others."""
    root, arrivals = hash_root(b"model"), []
    for number, length in enumerate((9, 70, 33)):
        tokens = prompt_of(length)
        params = SamplingParams(temperature=float(number % 2), seed=number, max_tokens=15 + 9 * number, top_logprobs=1)
        arrivals.append(
            Arrival(Request(f"r{number}", tokens, length, params, root, extend_hashes(root, tokens)), 0, -1, None)
        )
    runner = start(max_decodes)
    launch, overlapped = runner.full.launch, []

    def spy(batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        overlapped.append(0 if batch.token_sources is None else len(batch.token_sources))
        launch(batch, on_done)

    runner.full.launch = spy  # type: ignore[method-assign]
    want = serve(reference, "mixed", arrivals)
    got = serve(cast(TorchRunner, runner), "mixed", arrivals)
    assert {key: [o.token_ids for o in outputs] for key, outputs in want.items()} == {
        key: [o.token_ids for o in outputs] for key, outputs in got.items()
    }
    assert {3, 2, 1} <= set(overlapped)


def test_each_lane_captures_on_its_own_stream_with_its_own_memory(start: Start) -> None:
    runner = start()
    pools, streams = set(), set()
    for lane in (runner.full, *(split.decode for split in runner.splits)):
        graphs = graphs_of(lane)
        assert set(graphs) == {1, 2, 4}
        assert {graph.options["capture_error_mode"] for graph in graphs.values()} == {"thread_local"}
        assert {graph.options["stream"] for graph in graphs.values()} == {lane._stream}  # type: ignore[attr-defined]
        pools |= {graph.options["pool"] for graph in graphs.values()}
        streams.add(lane._stream)  # type: ignore[attr-defined]
    assert len(pools) == len(streams) == 4
    assert {what for what, _ in runner.progress} == {"capturing graphs"}
    count = 4 * len(graphs) + 7 * len(piecewise.SIZES)
    assert [fraction for _, fraction in runner.progress] == [number / count for number in range(1, count + 1)]


def test_steps_wait_on_the_device_for_copied_pages(start: Start) -> None:
    runner = start()
    runner.pool[3] = 5.0
    runner.copy_page(3, 7)
    assert (runner.pool[7] == 5.0).all()
    pager = Pager(runner)
    pager.generate(pager.start([1, 2, 3]), 1)
    stream: FakeStream = runner.full._stream  # type: ignore[attr-defined]
    assert stream.waits[-1] is runner.lanes.copies.done  # type: ignore[comparison-overlap]


def test_padding_and_warming_up_touch_only_the_spare_page(start: Start) -> None:
    runner = start()
    assert not runner.pool.any()
    pager = Pager(runner)
    sequences = [pager.start(prompt_of(length)) for length in (5, 20, 40)]
    for sequence in sequences:
        pager.step([(sequence, sequence.remaining)])
    pager.step([(sequence, 1) for sequence in sequences])
    used = {page for sequence in sequences for page in sequence.pages}
    assert {page for page in range(NUM_PAGES) if runner.pool[page].any()} == used


def test_every_lane_computes_a_step_before_it_serves(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run, warmed = warm_up.run, []

    def spy(lane: Lane, batch: Batch) -> None:
        warmed.append((lane, len(batch.token_ids)))
        run(lane, batch)

    monkeypatch.setattr(warm_up, "run", spy)
    runner = start()
    prefills = [(runner.full, 40), *((split.prefill, 40) for split in runner.splits)]
    assert warmed == prefills + [(split.decode, 20) for split in runner.splits]


def test_the_largest_steps_run_before_serving(start: Start) -> None:
    """A step full of prompts, and one of decodes with every sampling parameter."""
    runner = start()
    batches: list[Batch] = []
    launch = runner.full.launch

    def spy(batch: Batch, on_done: Callable[[], None] | None = None) -> None:
        batches.append(batch)
        launch(batch, on_done)

    runner.full.launch = spy  # type: ignore[method-assign]
    warm_up.run_largest(runner.full, 2 * LONGEST + 1, 3, LONGEST, NUM_PAGES)
    prompts, decodes = batches
    assert (len(prompts.token_ids), prompts.context_lens.tolist()) == (2 * LONGEST + 1, [1, LONGEST, LONGEST])
    assert (decodes.num_decodes, len(decodes.samples)) == (3, 3)
    assert not runner.pool.any(), "a page of the pool was written to"


@pytest.mark.parametrize(("max_decodes", "flashinfer"), [(0, True), (4, False)])
def test_without_graphs_everything_runs_eagerly(
    start: Start, reference: TorchRunner, max_decodes: int, flashinfer: bool
) -> None:
    runner = start(max_decodes, flashinfer)
    outputs = []
    for pager in (Pager(reference), Pager(runner)):
        outputs.append(pager.generate(pager.start(prompt_of(40)), 10, chunk=13))
    assert outputs[0] == outputs[1]
    assert runner.progress == []
    assert len(runner.splits) == 3


def test_a_device_that_cannot_be_divided_has_no_lanes(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise CudaUnavailableError("the package cuda-bindings is missing")

    monkeypatch.setattr(setup, "CudaDriver", missing)
    with caplog.at_level(logging.WARNING):
        assert start().splits == []
    assert "no lanes, so prompts and decodes share batches: the package cuda-bindings is missing" in caplog.text


def test_no_partition_is_left_if_the_driver_fails(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(FakeDriver):
        def create_stream(self, context: Any) -> int:
            if len(self.streams) == 3:
                raise CudaError("cuGreenCtxStreamCreate", "CUDA_ERROR_OUT_OF_MEMORY")
            return super().create_stream(context)

    driver = Refusing()
    monkeypatch.setattr(setup, "CudaDriver", lambda: driver)
    assert start().splits == []
    assert driver.calls.count("cuGreenCtxStreamCreate") == 3
    assert not driver.contexts
    assert not driver.streams


def test_lanes_are_not_made_unless_asked_for(start: Start) -> None:
    runner = start(split=False)
    assert runner.splits == []
    assert runner.progress[-1] == ("capturing graphs", 1.0)


def test_a_lane_calls_back_when_it_is_done(start: Start) -> None:
    runner = start()
    pager, called = Pager(runner), threading.Event()
    assert not runner.full.done()
    runner.full.launch(pager.batch([(pager.start(prompt_of(20)), 20)]), called.set)
    assert called.wait(20)
    assert runner.full.done()
    ran = runner.full.collect()
    assert len(ran.sampled) == 1
    assert ran.ms > 0
    assert not runner.full.done()
