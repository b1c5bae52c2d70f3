"""The load path with real client processes against the mock server."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import orjson
import pytest

from bench.client.target import Target
from bench.errors import BenchError
from bench.load.plan import LoadReport, Plan
from bench.load.run import _children, _expect_ready, run_load
from bench.mock.behaviour import Behaviour
from bench.mock.process import MockServer
from bench.prepare import prepare
from bench.record import Failure, Record
from bench.settings import RunSettings
from bench.tokens import Texts


class Collected:
    """Records what it is shown, and notices when this many requests are in flight."""

    def __init__(self, enough: int = 1) -> None:
        self._enough = enough
        self.records: list[Record] = []
        self.most_in_flight = 0
        self.begun = threading.Event()

    def update(self, finished: Sequence[Record], in_flight: int, elapsed_s: float) -> None:
        self.records += finished
        self.most_in_flight = max(self.most_in_flight, in_flight)
        if in_flight >= self._enough:
            self.begun.set()


@pytest.fixture(scope="module")
def server() -> Iterator[MockServer]:
    with MockServer(Behaviour(ttft_ms=20, itl_ms=2)) as server:
        yield server


def load(url: str, watch: Collected | None = None, processes: int = 1, **values: object) -> LoadReport:
    settings = RunSettings.load({"url": url, "input_len": "16", "output_len": "8", "seed": 1, **values})
    prepared = prepare(settings)
    plan = Plan(prepared.target, settings, prepared.texts, prepared.seed, processes)
    return run_load(plan, watch or Collected())


def most_at_a_time(records: Sequence[Record]) -> int:
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    running, most = 0, 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


@pytest.mark.parametrize("processes", [1, 2])
def test_a_closed_loop_sends_every_session_once_and_no_more_than_its_streams_at_a_time(processes: int) -> None:
    watch = Collected()
    with MockServer(Behaviour(ttft_ms=300, itl_ms=2)) as slow:
        report = load(slow.url, watch, processes, concurrency=6, num_requests=30)
    assert sorted(record.session for record in report.records) == list(range(30))
    assert {record.error for record in report.records} == {""}
    assert all(record.output_tokens == 8 and len(record.content_s) == 8 for record in report.records)
    assert most_at_a_time(report.records) == 6
    assert watch.records == report.records or len(watch.records) == 30
    assert report.health.processes == processes
    assert not report.interrupted


def test_an_open_loop_keeps_its_times_with_any_server() -> None:
    with MockServer(Behaviour(ttft_ms=20, itl_ms=2, stall_at_s=1.5, stall_s=2.0)) as stalling:
        given = {"url": stalling.url, "rate": 50, "arrival": "constant", "num_requests": 150, "input_len": "16"}
        settings = RunSettings.load({**given, "output_len": "8"})
        # Without trial requests: the time of the stall counts from the first request.
        plan = Plan(Target.of(settings, "mock"), settings, Texts.measured(1.0, 0), seed=1, processes=1)
        report = run_load(plan, Collected())
    due = [record.due_s - report.start_s for record in report.records]
    assert due == pytest.approx([index / 50 for index in range(150)])
    assert all(0 <= record.sent_s - record.due_s < 1.5 for record in report.records)
    longest = max(record.content_s[0] - record.due_s for record in report.records)
    assert longest > 1.5  # requests due in the stall waited for its end, and the records show it


def test_the_sessions_of_several_processes_are_those_of_one(server: MockServer) -> None:
    one, two = (load(server.url, None, processes, rate=200, num_requests=20) for processes in (1, 2))
    lengths = [[(r.session, r.prompt_tokens) for r in report.records] for report in (one, two)]
    assert lengths[0] == lengths[1]


def test_a_duration_ends_a_closed_loop_and_lets_what_runs_finish(server: MockServer) -> None:
    report = load(server.url, concurrency=3, duration=1.5)
    assert report.records
    assert {record.error for record in report.records} == {""}
    assert all(record.due_s - report.start_s < 1.5 for record in report.records)


def test_turns_follow_one_another_and_carry_the_answers_before(server: MockServer) -> None:
    report = load(
        server.url, concurrency=2, num_requests=4, workload="multi-turn", turns=3, input_len="24", later_len="12"
    )
    assert len(report.records) == 12
    for session in range(4):
        turns = sorted((r for r in report.records if r.session == session), key=lambda record: record.turn)
        assert [record.turn for record in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert after.sent_s >= before.ended_s
            assert before.prompt_tokens is not None
            assert after.prompt_tokens is not None
            # the conversation so far, the 8 words of the answer, and 12 new ones
            assert after.prompt_tokens - before.prompt_tokens == pytest.approx(20, abs=1)


def test_a_failed_turn_ends_its_session() -> None:
    with MockServer(Behaviour(ttft_ms=5, itl_ms=1, fault="cut", fault_after=3)) as cutting:
        report = load(cutting.url, concurrency=2, num_requests=4, workload="multi-turn", turns=3)
    assert [(record.turn, record.error) for record in report.records] == [(0, Failure.DISCONNECTED)] * 4


def test_a_prefix_whose_single_token_has_no_text_fills_the_cache_all_the_same() -> None:
    with MockServer(Behaviour(ttft_ms=5, itl_ms=1, output_tokens=0)) as silent:
        report = load(silent.url, concurrency=1, num_requests=2, workload="shared-prefix", input_len="64")
    assert [record.error for record in report.records] == [Failure.EMPTY] * 2


def test_users_pause_between_their_sessions(server: MockServer) -> None:
    report = load(server.url, users=2, num_requests=6, think_s="0.2")
    assert min(record.due_s - report.start_s for record in report.records) >= 0.2
    assert most_at_a_time(report.records) <= 2


def test_ctrl_c_aborts_running_requests_and_keeps_the_results_so_far() -> None:
    with MockServer(Behaviour(ttft_ms=20, itl_ms=20)) as slow:
        watch = Collected(enough=4)

        def press_when_begun() -> None:
            watch.begun.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        press = threading.Thread(target=press_when_begun)
        press.start()
        report = load(slow.url, watch, 2, concurrency=4, num_requests=100, output_len="500")
        press.join()
    assert report.interrupted
    assert {record.error for record in report.records} == {Failure.ABORTED}
    assert len(report.records) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_client_processes_take_no_notice_of_ctrl_c_from_their_first_moment() -> None:
    settings = RunSettings.load({"concurrency": 1})
    plan = Plan(Target.of(settings, "any"), settings, Texts.measured(1.0, 0), seed=0, processes=1)
    with _children(plan) as children:
        for child in children:
            assert child.process.pid is not None
            os.kill(child.process.pid, signal.SIGINT)
            _expect_ready(child)
            child.process.kill()


def test_who_asks_whether_it_is_enough_knows_since_when_there_are_answers() -> None:
    asked: list[tuple[float, bool]] = []

    def enough(elapsed_s: float, waiting: int, answered: bool) -> bool:
        asked.append((elapsed_s, answered))
        return False

    with MockServer(Behaviour(ttft_ms=1500, itl_ms=2)) as slow:
        settings = RunSettings.load({"url": slow.url, "rate": 4, "num_requests": 10, "arrival": "constant", "seed": 1})
        prepared = prepare(settings)
        run_load(Plan(prepared.target, settings, prepared.texts, prepared.seed, 1), Collected(), enough)
    assert min(elapsed_s for elapsed_s, answered in asked if answered) >= 1.5
    assert any(elapsed_s < 1.5 for elapsed_s, answered in asked if not answered)


def test_a_file_that_a_client_process_cannot_read_is_reported_by_the_parent(
    server: MockServer, tmp_path: os.PathLike[str]
) -> None:
    path = os.path.join(tmp_path, "trace.jsonl")
    with open(path, "wb") as file:
        file.write(
            orjson.dumps({"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}) + b"\nnonsense\n"
        )
    with pytest.raises(BenchError, match=r"trace\.jsonl:2"):
        load(server.url, workload="trace", file=path)
