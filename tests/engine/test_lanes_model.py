"""Lanes with a real model on real threads give the same tokens as mixed batches."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpd.common.blocks import extend_hashes, hash_root
from cpd.performance.colocation import Colocation, Mode
from engine.engine import Engine
from engine.execution.cpu.lanes import use_threads
from engine.execution.runner import TorchRunner
from engine.kv.host_tier import HostMemory
from engine.model.config import load_config
from engine.types import Output, Request, SamplingParams
from tests.conftest import MakeCheckpoint
from tests.engine.fakes import MODEL, assert_all_released

NUM_PAGES = 40
LONGEST = 300


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it arrives, and the step before which choices are ended (-1: never)."""

    request: Request
    step: int
    ended_step: int
    ended: list[int] | None


@pytest.fixture(scope="module")
def runner(checkpoint: MakeCheckpoint) -> Iterator[TorchRunner]:
    """A runner whose lanes have one core each."""
    use_threads(2)
    directory = checkpoint("qwen3")
    kv_bytes = NUM_PAGES * load_config(directory).page_bytes("float32")
    yield TorchRunner(directory, dtype="float32", device="cpu", kv_bytes=kv_bytes, max_model_len=LONGEST)
    use_threads(1)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Prompts of all sizes with shared prefixes, and all sampling parameters."""
    root = hash_root(b"model")
    result = []
    for number in range(draw(st.integers(4, 9))):
        shared = [5 + i % 90 for i in range(draw(st.sampled_from([0, 0, 32, 64])))]
        tail = [(number * 31 + i * 7) % 480 for i in range(draw(st.sampled_from([1, 9, 70, 150, 200])))]
        drawn = draw(st.booleans())
        params = SamplingParams(
            temperature=1.0 if drawn else 0.0,
            seed=number,
            top_p=draw(st.sampled_from([1.0, 0.8])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
            top_logprobs=draw(st.sampled_from([None, 2])),
            max_tokens=draw(st.sampled_from([1, 20, 40, 80])),
        )
        tokens = shared + tail
        request = Request(
            f"r{number}",
            tokens,
            len(tokens),
            params,
            root,
            extend_hashes(root, tokens),
            n=draw(st.sampled_from([1, 1, 3])),
        )
        step = draw(st.integers(0, 25))
        ended = step + draw(st.integers(0, 12)) if draw(st.sampled_from([False, False, True])) else -1
        result.append(Arrival(request, step, ended, draw(st.sampled_from([None, [0], [1, 2]]))))
    return result


def serve(
    runner: TorchRunner,
    mode: Mode,
    comings: list[Arrival],
    max_model_len: int = LONGEST,
    host: HostMemory | None = None,
) -> dict[tuple[str, int], list[Output]]:
    """All outputs of all choices."""
    engine = Engine(
        runner,
        max_model_len=max_model_len,
        colocation=Colocation(MODEL, token_budget=48, mode=mode, splits=[split.shares for split in runner.splits]),
        max_num_seqs=6,
        max_queue_tokens=10_000,
        host=host,
    )
    done = threading.Event()
    engine.set_work_callback(done.set)
    outputs: dict[tuple[str, int], list[Output]] = {}
    left, step = list(comings), 0
    while left or engine.has_work or engine.stats().pages.used:
        for arrival in tuple(left):
            if arrival.step == step:
                engine.add(arrival.request)
            if step >= max(arrival.step, arrival.ended_step):
                left.remove(arrival)
                if arrival.ended_step >= 0:
                    engine.abort(arrival.request.id, arrival.ended)
        if engine.has_work:
            for output in engine.step().outputs:
                outputs.setdefault((output.request_id, output.choice), []).append(output)
            engine.check_integrity()
        elif engine.stats().pages.used:
            assert done.wait(20)
            done.clear()
        step += 1
    assert_all_released(engine)
    return outputs


@pytest.mark.parametrize("mode", ["lanes", "auto"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(comings=arrivals())
def test_tokens_are_the_same_in_every_mode(runner: TorchRunner, mode: Mode, comings: list[Arrival]) -> None:
    """Exactly the same, logprobs too: the kernels compute the same bits in every batch and on any number of cores."""
    assert runner.splits
    want, got = serve(runner, "mixed", comings), serve(runner, mode, comings)
    partly = {
        (arrival.request.id, choice)
        for arrival in comings
        if arrival.ended_step >= 0
        for choice in (range(3) if arrival.ended is None else arrival.ended)
    }
    for key in want.keys() | got.keys():
        tokens = [[output.token_ids for output in outputs.get(key, [])] for outputs in (want, got)]
        if key in partly:  # ended earlier in one of them
            shorter = min(map(len, tokens))
            assert tokens[0][:shorter] == tokens[1][:shorter]
            continue
        assert tokens[0] == tokens[1]
        assert [output.logprobs for output in want[key]] == [output.logprobs for output in got[key]]
        assert want[key][-1].finish is got[key][-1].finish
