"""The study against servers of known behaviour, in virtual time: nothing else takes any time."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from bench.client.client import Client
from bench.client.target import Target
from bench.interference.result import Cell
from bench.interference.settings import InterferenceSettings
from bench.interference.study import Study, StudyError
from bench.tokens import Texts
from tests.bench.interference.engine_server import Engine, engine_beside
from tests.virtual_time import VirtualClock, run_in_virtual_time, virtual_perf_counter

QUICK: dict[str, Any] = {
    "decodes": 4,
    "decode_len": 8,
    "prefills": "2",
    "prefill_len": "500",
    "repeats": 1,
    "window_s": 0.2,
    "settle_s": 2.0,
}


def study(engine: Engine, say: Callable[[str], None] = lambda _: None, **settings: Any) -> list[Cell]:
    async def main() -> list[Cell]:
        with pytest.MonkeyPatch.context() as patch, virtual_perf_counter():
            patch.setattr("bench.interference.study.Clock", VirtualClock)
            async with engine_beside(engine) as url:
                chosen = InterferenceSettings.load(QUICK | {"url": url} | settings)
                client = Client(Target.of(chosen, "m"))
                running = Study(client, Texts.measured(1.0, 0), chosen, 1, say)
                try:
                    await running.run(lambda _: None)
                finally:
                    await client.close()
        return running.cells

    return run_in_virtual_time(main())[0]


def test_prompts_in_the_decoding_step_lengthen_it() -> None:
    (cell,) = study(Engine(ms_per_1000=200))
    (burst,) = cell.bursts
    assert burst.increase_percent > 200
    assert burst.during.max_ms > 90  # for one prompt, if they arrived in two steps
    assert burst.recovery_s is not None
    assert len(burst.ttft_ms) == len(burst.idle_ttft_ms) == 2
    assert burst.prompt_tokens == 1000
    assert burst.drained


def test_it_says_how_far_it_is_and_how_long_the_rest_will_take() -> None:
    said: list[str] = []
    study(Engine(ms_per_1000=200), said.append, repeats=3)
    assert said[1].endswith("burst 1 of 3 (1 of 3 in all)")
    lefts = [re.search(r"\((\d) of 3 in all, about (\d+) s left\)$", text) for text in said[2:]]
    assert [found and int(found[1]) for found in lefts] == [2, 3]
    assert int(lefts[0][2]) > int(lefts[1][2]) > 0  # type: ignore[index]


def test_a_lane_beside_decoding_costs_decoding_nothing() -> None:
    (cell,) = study(Engine(ms_per_1000=200, lanes=True), repeats=3)
    assert cell.increase_percent is not None
    assert cell.increase_percent.median < 50
    assert cell.ttft_ms is not None
    assert cell.ttft_ms.median > 80


def test_larger_bursts_come_later_and_cost_more() -> None:
    cells = study(Engine(ms_per_1000=100), prefills="1,4", prefill_len="100,1000")
    assert [cell.size for cell in cells] == [100, 400, 1000, 4000]
    assert cells[0].bursts[0].increase_percent < cells[-1].bursts[0].increase_percent


def test_the_timeline_shows_the_burst_at_its_origin() -> None:
    (cell,) = study(Engine(ms_per_1000=200))
    (burst,) = cell.bursts
    at_ms, _ = max(burst.timeline, key=lambda point: point[1])
    assert burst.timeline[0][0] < 0 < at_ms < burst.burst_ms + 100


def test_a_server_that_stays_slow_has_not_recovered() -> None:
    (cell,) = study(Engine(worn_by=500), settle_s=0.5)
    (burst,) = cell.bursts
    assert burst.recovery_s is None
    assert burst.after_ms is not None
    assert burst.after_ms > 1.5 * burst.before.mean_ms


def test_streams_that_end_too_early_end_the_study_with_advice() -> None:
    with pytest.raises(StudyError, match="--decode-output-len"):
        study(Engine(answer=10), settle_s=0.3)


def test_refused_prompts_are_an_error_of_their_kind_alone() -> None:
    cells = study(Engine(longest=600), prefill_len="100,1000")
    assert cells[0].bursts
    assert not cells[0].error
    assert not cells[1].bursts
    assert "http_400 at most 600 tokens" in cells[1].error


def test_refused_decode_streams_end_the_study() -> None:
    with pytest.raises(StudyError, match="at most 600 tokens"):
        study(Engine(longest=600), decode_len=1000)


def test_a_server_that_goes_on_for_clients_that_have_gone_is_not_drained() -> None:
    (cell,) = study(Engine(keeps_running=True, ms_per_1000=100), prefill_len="50", repeats=2, settle_s=0.5)
    assert [burst.drained for burst in cell.bursts] == [True, False]


async def test_a_server_that_is_gone_ends_the_study() -> None:
    settings = InterferenceSettings.load(QUICK | {"url": "http://127.0.0.1:9"})
    client = Client(Target.of(settings, "m"))
    with pytest.raises(StudyError, match=r"doesn't answer a short prompt: .*connect"):
        await Study(client, Texts.measured(1.0, 0), settings, 1, lambda _: None).run(lambda _: None)
    await client.close()
