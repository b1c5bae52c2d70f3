from collections.abc import Iterator

import pytest

from cpd.common.errors import ConfigError
from cpd.performance.model import Profile, Work
from router.placement.candidate import Candidate
from router.placement.policies import POLICIES
from router.placement.policy import Situation
from sim.cluster import policies
from sim.cluster.mistakes import scaled
from sim.cluster.policies import SYSTEMS
from sim.cluster.settings import SimSettings
from sim.cluster.simulation import SimCluster
from sim.cluster.work import decodes_s, prompts_s
from sim.cluster.workload import Session, Turn, Workload, make_workload
from tests.sim.clusters import MODEL, NETWORK_MS, Fixed, one_turn, prompt, settings, simulate

ALL = (*POLICIES, *SYSTEMS, "tests.router.placement.test_policies:LastPolicy")
ROUND_TRIP_MS = 2 * NETWORK_MS


class Until(Workload):
    """The sessions of another workload. Asking for more after one that begins later than `end_s` is an error."""

    def __init__(self, end_s: float, sessions: Workload) -> None:
        self._end_s = end_s
        self._sessions = sessions

    def sessions(self) -> Iterator[Session]:
        for session in self._sessions.sessions():
            yield session
            assert session.start_s <= self._end_s


def test_one_request_takes_as_long_as_the_model_predicts() -> None:
    outcome, _ = simulate("sglang", one_turn(0.0, prompt(500), 4), workers=1)
    (record,) = outcome.records
    ms = [round(1e3 * (at - record.due_s), 9) for at in record.content_s]
    first = MODEL.step_ms(Work.prefill(500)) + ROUND_TRIP_MS
    assert ms[0] == pytest.approx(first)
    decodes = [MODEL.step_ms(Work.decode(1, 501 + i)) for i in range(3)]
    assert ms[1:] == pytest.approx([first + sum(decodes[: i + 1]) for i in range(3)])
    assert record.ended_s == record.content_s[-1]
    assert (record.output_tokens, record.cached_tokens, record.route) == (4, 0, "local")


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    outcome, _ = simulate("sglang", one_turn(0.0, prompt(600), 1), one_turn(0.001, prompt(300, 1), 1), workers=1)
    first_ms = MODEL.step_ms(Work.prefill(600)) + ROUND_TRIP_MS
    second_ms = first_ms + MODEL.step_ms(Work.prefill(300))
    assert [1e3 * record.content_s[0] for record in outcome.records] == pytest.approx([first_ms, second_ms])


def test_late_prompts_do_not_keep_others_from_a_prefill_worker() -> None:
    stream = one_turn(0.0, prompt(600, 99), 1_000)
    too_many = [one_turn(0.5, prompt(30_000, number), 1) for number in range(1, 9)]
    outcome, _ = simulate("cost", stream, *too_many, one_turn(3.0, prompt(8_000, 50), 1), slo_itl=5.0)
    last = outcome.records[-1]
    assert last.route == "remote"
    assert last.content_s[0] - last.due_s < 2.0


def test_the_first_token_of_a_remote_prefill_does_not_wait_for_pages() -> None:
    outcome, _ = simulate("static-pd", one_turn(0.0, prompt(800), 3))
    (record,) = outcome.records
    prefill_ms = MODEL.step_ms(Work.prefill(800))
    # Router to decode worker to prefill worker, and back.
    assert 1e3 * record.content_s[0] == pytest.approx(4 * NETWORK_MS + prefill_ms)
    # The landing is known by then; the push of the pages is the exposed tail.
    pages_ms = MODEL.transfer_ms(50 * MODEL.profile.page_bytes)
    decode_ms = MODEL.step_ms(Work.decode(1, 801))
    second = 2 * NETWORK_MS + prefill_ms + pages_ms + decode_ms + NETWORK_MS
    assert 1e3 * record.content_s[1] == pytest.approx(second)
    assert record.route == "remote"


def test_pages_are_pushed_while_the_next_chunk_is_computed() -> None:
    outcome, _ = simulate("static-pd", one_turn(0.0, prompt(20_000), 2))
    (record,) = outcome.records
    gap_ms = 1e3 * (record.content_s[1] - record.content_s[0])
    assert gap_ms < MODEL.transfer_ms(1250 * MODEL.profile.page_bytes) / 2


def test_a_prefix_cached_on_another_worker_is_fetched_instead_of_computed() -> None:
    shared = prompt(3200)
    burst = [one_turn(1.0, shared + prompt(20, 1 + number), 400) for number in range(100)]
    outcome, cluster = simulate("cost-no-remote", one_turn(0.0, shared, 4), *burst)
    _, *records = outcome.records
    assert {record.cached_tokens for record in records} == {3200}
    assert all(worker.engine.stats().decode_tokens for worker in cluster.workers)
    assert sum(worker.engine.stats().prefill_tokens for worker in cluster.workers) == 3200 + 100 * 20
    for worker in cluster.workers:
        worker.engine.check_integrity()


def test_only_missing_pages_are_sent() -> None:
    turns = [Turn(prompt(3200), 20), Turn(prompt(320, 1), 4, pause_s=1.0)]
    outcome, _ = simulate("static-pd", Session(0.0, turns), one_turn(2.0, prompt(3200), 4))
    _, later, same = outcome.records
    assert later.cached_tokens == 3200 + 16  # with the output except its last token
    assert same.cached_tokens == 3199


def test_a_later_turn_finds_the_earlier_ones_in_the_cache() -> None:
    turns = [Turn(prompt(160), 17), Turn(prompt(100, 1), 2, pause_s=0.5)]
    outcome, _ = simulate("cost", Session(0.0, turns))
    first, second = outcome.records
    assert second.due_s == pytest.approx(first.ended_s + 0.5)
    assert (second.input_len, second.cached_tokens) == (160 + 17 + 100, 176)


def test_requests_fail_if_all_queues_are_full() -> None:
    sessions = [one_turn(0.0, prompt(3000, i), 2) for i in range(8)]
    outcome, cluster = simulate("sglang", *sessions, max_queue_tokens=4000)
    errors = [record.error for record in outcome.records]
    assert 0 < errors.count("http_429") < 8
    assert set(errors) == {"", "http_429"}
    for worker in cluster.workers:
        worker.engine.check_integrity()


def test_a_request_fails_after_three_full_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def spied(seen: Situation) -> tuple[Candidate, Candidate | None]:
        tried.append(seen.prompt.tokens)
        return sglang(seen)

    sglang = policies._sglang
    monkeypatch.setattr(policies, "_sglang", spied)
    before = [one_turn(0.0, prompt(1900, i), 2) for i in range(20)]
    outcome, _ = simulate("sglang", *before, one_turn(0.01, prompt(2999, 20), 2), workers=5, max_queue_tokens=4000)
    assert outcome.records[-1].error == "http_429"
    assert tried.count(2999) == 3


def test_a_prompt_that_no_prefill_worker_takes_is_computed_by_a_combined_one() -> None:
    sessions = [one_turn(0.001 * i, prompt(3000, i), 2) for i in range(3)]
    outcome, cluster = simulate("static-pd", *sessions, max_queue_tokens=4000)
    assert [record.error for record in outcome.records] == ["", "", ""]
    assert [record.route for record in outcome.records] == ["remote", "remote", "local"]
    for worker in cluster.workers:
        worker.engine.check_integrity()


@pytest.mark.parametrize("policy", ALL)
def test_every_request_ends_once_with_all_its_tokens_and_all_pages_come_back(policy: str) -> None:
    shape = settings(policy=policy, workers=4, prefill_workers=2, duration=2.0, long_share=0.2, num_pages=3000)
    cluster = SimCluster(shape, make_workload(shape, 10.0))
    outcome = cluster.run()
    assert len(outcome.records) > 5
    for record in outcome.records:
        assert record.error == ""
        assert len(record.content_s) == record.output_tokens == record.output_len
        assert record.content_s == sorted(record.content_s)
        assert record.content_s[0] > record.due_s
    for worker in cluster.workers:
        worker.engine.check_integrity()


@pytest.mark.parametrize("policy", ["cost", "static-pd"])
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    def run(seed: int) -> list[list[float]]:
        shape = settings(policy=policy, workers=3, duration=1.0, seed=seed)
        return [record.content_s for record in SimCluster(shape, make_workload(shape, 8.0)).run().records]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_each_policy_uses_its_workers() -> None:
    for policy in ALL:
        shape = settings(policy=policy, workers=4, prefill_workers=2, duration=0.5)
        cluster = SimCluster(shape, make_workload(shape, 8.0))
        routes = {record.route for record in cluster.run().records}
        roles = [worker.role for worker in cluster.workers]
        match policy:
            case "static-pd":
                assert routes == {"remote"}
            case "sglang" | "sglang-lanes" | "dynamo" | "cost-no-remote":
                assert roles == ["combined"] * 4
                assert routes == {"local"}
            case _:
                assert roles == ["prefill"] * 2 + ["combined"] * 2


def test_requests_can_be_balanced_while_steps_are_not() -> None:
    sessions = [one_turn(0.0, prompt(length), 2000) for length in (30_000, 100)]
    outcome, _ = simulate("sglang", *sessions, warmup=3.0, duration=1.0)
    assert outcome.imbalance == pytest.approx(1.0, abs=0.02)
    long, short = (MODEL.step_ms(Work.decode(1, length)) for length in (30_500, 700))
    assert outcome.step_imbalance == pytest.approx(2 * long / (long + short), abs=0.02)


def test_the_device_time_of_a_worker_is_that_of_its_prompts_and_decodes() -> None:
    sessions = [one_turn(0.0, prompt(length, length), 50) for length in (3_000, 300)]
    outcome, cluster = simulate("sglang", *sessions, duration=2.0)
    work_s = [
        prompts_s(MODEL, Work.prefill(length)) + decodes_s(MODEL, Work.decode(49, 49 * (length + 25)))
        for length in (3_000, 300)
    ]
    assert sorted(worker.device_s for worker in cluster.workers) == pytest.approx(sorted(work_s), rel=0.01)
    assert outcome.work_imbalance == pytest.approx(2 * work_s[0] / sum(work_s), rel=0.01)


def test_an_overload_ends_the_search_early() -> None:
    shape = settings(policy="sglang", workers=1, prefill_workers=0, duration=60.0, long_share=1.0)
    cluster = SimCluster(shape, Until(10.0, make_workload(shape, 50.0)))
    assert not cluster.sustains(0.95, 3000)


def test_a_run_continues_after_the_verdict() -> None:
    shape = settings(workers=3, duration=2.0)
    records = SimCluster(shape, make_workload(shape, 8.0)).run().records
    cluster = SimCluster(shape, Until(4.0, make_workload(shape, 8.0)))
    assert cluster.sustains(0.5, 16)
    cluster = SimCluster(shape, make_workload(shape, 8.0))
    assert cluster.sustains(0.5, 16)
    assert cluster.run().records == records


def test_an_overload_is_judged_before_the_late_are_answered() -> None:
    shape = settings(workers=2, prefill_workers=0, duration=4.0, long_share=1.0)
    whole = SimCluster(shape, make_workload(shape, 10.0)).run()
    assert 0 < whole.good < len(whole.records)
    cluster = SimCluster(shape, make_workload(shape, 10.0))
    assert cluster.judge() == whole.good
    assert any(not record.ended_s for record in cluster.records)
    assert cluster.run().records == whole.records


def test_a_cluster_without_combined_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no combined one"):
        simulate("static-pd", workers=2, prefill_workers=2)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_worker_with_a_wrong_profile_serves_its_share_within_the_targets(factor: float) -> None:
    settings = SimSettings(workers=4, prefill_workers=0, agent_share=0.0, warmup=10.0, duration=10.0)

    def believed(name: str, profile: Profile) -> Profile:
        return scaled(profile, factor) if name == "worker-0" else profile

    outcome = SimCluster(settings, make_workload(settings, 40.0), believed).run()
    assert outcome.good > 0.97 * len(outcome.records)
    share = sum(record.worker == "worker-0" for record in outcome.records) / len(outcome.records)
    assert 0.1 < share < 0.45


def test_workers_change_their_roles_while_it_runs() -> None:
    long = [one_turn(0.2 * number, prompt(8_000, number), 200) for number in range(20)]
    shape = settings(policy="cost", workers=4, prefill_workers=0)
    cluster = SimCluster(shape, Fixed(*long), schedule=[(0.9, 3), (2.9, 1)])
    outcome = cluster.run()
    routes = {time_s: {one.route for one in outcome.records if time_s[0] < one.due_s < time_s[1]} for time_s in
              ((0.0, 0.9), (1.0, 2.9))}  # fmt: skip
    assert routes[0.0, 0.9] == {"local"}
    assert "remote" in routes[1.0, 2.9]
    assert all(one.output_tokens == 200 for one in outcome.records)  # streams on workers that change go on there
    assert sum(worker.role == "prefill" for worker in cluster.workers) == 1
    for worker in cluster.workers:
        worker.engine.check_integrity()


@pytest.mark.parametrize("count", [-1, 4])
def test_some_worker_is_always_combined(count: int) -> None:
    cluster = SimCluster(settings(workers=4), Fixed())
    with pytest.raises(ValueError, match="can't be prefill workers"):
        cluster.set_prefill_workers(count)


def test_a_planner_corrects_a_wrong_start() -> None:
    shape = settings(workers=4, prefill_workers=3, planner="act", long_share=0.0, agent_share=0.0, duration=25.0)
    cluster = SimCluster(shape, make_workload(shape, 60.0))
    outcome = cluster.run()
    ((_, plan),) = outcome.changes
    assert (plan.current, plan.prefill_workers) == (3, 0)
    assert all(worker.role == "combined" for worker in cluster.workers)
    assert not any(one.error for one in outcome.records)


def test_a_planner_leaves_systems_alone_that_have_no_roles() -> None:
    shape = settings(workers=3, policy="sglang", planner="act")
    cluster = SimCluster(shape, make_workload(shape, 20.0))
    assert not cluster.run().changes
    assert not cluster.plans
