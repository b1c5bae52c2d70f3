"""What needs no Ray; the changes themselves are tested in tests/e2e/test_up.py."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from pydantic_core import to_json

from cpd.common.errors import ConfigError, CPDError
from cpd.common.membership import Member
from cpd.common.process import EXIT_DRAINED
from cpd.common.scaling import ModelNumbers
from cpd.common.settings import ClusterSettings
from deploy import changes as module
from deploy.changes import FIXED, STARTS, Changes, Plan, start_error
from deploy.cluster import Cluster, Tell
from deploy.process import ProcessState
from deploy.processes import LAUNCH_MARK, ProcessSpec, processes
from deploy.state import ClusterState
from models import tiny
from tests.secret import secret_file

SETTINGS = ClusterSettings(model="m", combined=2, secret_file=secret_file())
PLAN = Plan(SETTINGS, SETTINGS, "127.0.0.1", 0.0, "mark")


def state(pid: int | None, starts: int, error: str | None = None) -> ProcessState:
    return ProcessState("host", pid, starts, error, exit_code=-9, lines=[], next_line=0)


def test_settings_that_cannot_change_exist() -> None:
    assert set(ClusterSettings.model_fields) >= FIXED


def test_a_new_process_has_its_own_name_and_the_cluster_s_mark() -> None:
    spec = PLAN.process("combined", 7)
    assert (spec.name, spec.members, spec.flags["worker_id"]) == ("combined-7", ("combined-7",), "combined-7")
    assert spec.environment({})[LAUNCH_MARK] == "mark"
    assert PLAN.process("router", 1).flags["router_id"] == "router-1"


def test_a_new_worker_of_one_of_several_models_has_its_name_and_settings() -> None:
    models = [{"name": name, "model": f"/models/{name}"} for name in ("small", "large")]
    settings = ClusterSettings.load({"models": models, "secret_file": secret_file()})
    spec = Plan(settings, settings, "127.0.0.1", 0.0, "mark").process("combined", 3, "large")
    assert (spec.name, spec.model, spec.serves) == ("large-combined-3", "/models/large", "large")
    assert (spec.flags["worker_id"], spec.flags["served_model_name"]) == ("large-combined-3", "large")


def test_a_process_that_refuses_or_keeps_dying_does_not_start() -> None:
    spec = PLAN.process("combined", 0)
    assert start_error(spec, None) == ""
    assert start_error(spec, state(1, STARTS + 1)) == ""
    assert start_error(spec, state(None, STARTS - 1)) == ""
    assert start_error(spec, state(None, 1, "no room")) == "combined-0 on host: no room"
    assert "has died 3 times while starting, last with exit code -9" in start_error(spec, state(None, STARTS))


class Started:
    """Processes of a cluster, of which some were drained, crash, or are lost."""

    closed = False

    def __init__(
        self,
        settings: ClusterSettings,
        drained: Collection[str] = (),
        crashed: Collection[str] = (),
        lost: Collection[str] = (),
    ) -> None:
        self.specs = processes(settings, "127.0.0.1")
        self._drained, self._crashed, self._lost = set(drained), crashed, lost
        self.restarted: list[str] = []

    def stop(self, name: str) -> None:
        self.specs = [spec for spec in self.specs if spec.name != name]

    def start(self, *_: object) -> None:
        raise ConfigError("there is no room")

    def restart(self, name: str, spec: ProcessSpec) -> None:
        self.restarted.append(name)
        self._drained.discard(name)

    def resources(self) -> dict[str, float]:
        return {}

    def machine_is_lost(self, name: str) -> bool:
        return name in self._lost

    def lost(self) -> dict[str, str]:
        return dict.fromkeys(self._lost, "its machine was lost")

    def state(self, name: str) -> ProcessState:
        if name in self._crashed:
            return state(None, STARTS)
        return replace(state(None, 1), exit_code=EXIT_DRAINED) if name in self._drained else state(1, 1)


def changes_of(cluster: Started, settings: ClusterSettings) -> Changes:
    """Returns changes of a cluster whose processes hold their leases if they run."""

    def leases() -> list[Member]:
        return [Member(spec.name, "combined", "address", "host", 1) for spec in cluster.specs]

    plan = Plan(settings, settings, "127.0.0.1", 0.0, "")
    return Changes(cast(Cluster, cluster), plan, cast(ClusterState, None), leases, lambda given: given)


def loaded(tmp_path: Path, **settings: object) -> tuple[ClusterSettings, Path]:
    """Returns the settings of a config file, and the file."""
    file = tmp_path / "cpd.yaml"
    file.write_text(to_json({"secret_file": str(secret_file()), "prefill": 0, **settings}).decode())
    return ClusterSettings.load({}, file), file


def numbers(settings: ClusterSettings, drained: Collection[str] = ()) -> tuple[list[ModelNumbers], int]:
    plan = Plan(settings, settings, "127.0.0.1", 0.0, "mark")
    started = cast(Cluster, Started(settings, drained))
    return Changes(started, plan, cast(ClusterState, None), list, lambda given: given).numbers()


class Resized(Changes):
    """Notes what would be started and ended."""

    def __init__(self, settings: ClusterSettings, **processes: Collection[str]) -> None:
        plan = Plan(settings, settings, "127.0.0.1", 0.0, "mark")
        started = cast(Cluster, Started(settings, **processes))
        super().__init__(started, plan, cast(ClusterState, None), list, lambda given: given)
        self.started: list[str] = []
        self.ended: list[str] = []

    def _start_and_end(self, new: Sequence[ProcessSpec], leaving: Sequence[str], tell: Tell) -> None:
        self.started += [spec.name for spec in new]
        self.ended += leaving


@pytest.mark.parametrize(
    ("workers", "started", "ended"),
    [
        (6, ["combined-4"], []),
        (5, [], []),
        (4, [], ["combined-2"]),
        (3, [], ["combined-2", "combined-0"]),
        (1, [], ["combined-2", "combined-0", "combined-3"]),
    ],
)
def test_the_number_of_workers_changes_by_combined_ones(workers: int, started: list[str], ended: list[str]) -> None:
    changes = Resized(ClusterSettings(model="m", combined=4, prefill=1, secret_file=secret_file()))
    ready = ["prefill-0", "combined-2", "combined-0", "combined-3", "combined-1"]
    assert changes.resize(workers, ready, print) == ended
    assert (changes.started, changes.ended) == (started, ended)


def test_drained_workers_are_replaced_and_do_not_count() -> None:
    settings = ClusterSettings(model="m", combined=4, prefill=2, secret_file=secret_file())
    one = Resized(settings, drained={"combined-1"})
    one.resize(6, ["prefill-0", "prefill-1", "combined-0", "combined-2", "combined-3"], print)
    assert (one.started, one.ended) == (["combined-1"], [])
    other = Resized(settings, drained={"prefill-1"})
    other.resize(4, ["combined-3", "combined-2", "combined-1", "combined-0", "prefill-0"], print)
    assert (other.started, other.ended) == ([], ["combined-3"])


def test_workers_started_by_hand_count() -> None:
    settings = ClusterSettings(model="m", combined=4, prefill=0, secret_file=secret_file())
    ready = ["mine", "yours", "combined-0", "combined-1", "combined-2", "combined-3"]
    for wanted, started, ended in ((7, ["combined-4"], []), (6, [], []), (5, [], ["combined-0"])):
        one = Resized(settings)
        one.resize(wanted, ready, print)
        assert (one.started, one.ended) == (started, ended)


def test_a_worker_that_is_restarting_is_not_replaced_but_ends_first() -> None:
    settings = ClusterSettings(model="m", combined=4, prefill=0, secret_file=secret_file())
    ready = ["combined-0", "combined-1", "combined-3"]
    for wanted, ended in ((4, []), (3, ["combined-2"]), (2, ["combined-2", "combined-0"])):
        one = Resized(settings)
        one.resize(wanted, ready, print)
        assert (one.started, one.ended) == ([], ended)


def test_fewer_processes_are_wanted_and_those_that_do_not_run_end_first() -> None:
    settings = ClusterSettings(model="m", combined=4, prefill=0, routers=2, secret_file=secret_file())
    changes = Resized(settings, crashed={"combined-1"}, lost={"combined-0", "router-0"})
    changes.scale({"combined": 1, "router": 1}, print)
    assert changes.ended == ["combined-1", "combined-0", "combined-3", "router-0"]


def test_numbers_count_what_was_started_and_not_drained() -> None:
    models = [{"name": name, "model": f"/models/{name}", "prefill": 1, "combined": 2} for name in ("small", "large")]
    settings = ClusterSettings.load({"models": models, "routers": 2, "secret_file": secret_file()})
    assert numbers(settings, {"large-combined-1", "router-0"}) == (
        [{"model": "small", "combined": 2, "prefill": 1}, {"model": "large", "combined": 1, "prefill": 1}],
        1,
    )
    assert numbers(SETTINGS) == ([{"model": "", "combined": 2, "prefill": 1}], 1)


def test_the_number_of_simulated_workers_can_not_change() -> None:
    settings = ClusterSettings(model="m", simulate="instant", secret_file=secret_file())
    assert numbers(settings) == ([], 1)


def test_a_drained_router_need_not_use_what_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = loaded(tmp_path, model=str(tiny.CHECKPOINT), combined=1, routers=2)
    expected: list[list[str]] = []

    def use(state: ClusterState, workers: object, routers: list[str]) -> bool:
        expected.append(routers)
        return True

    monkeypatch.setattr(module, "has_workers", use)
    changes_of(Started(settings, drained={"router-1"}), settings).restart({"names": ["combined-0", "router-1"]}, print)
    assert expected == [["router-0"], ["router-0", "router-1"]]


@pytest.mark.parametrize("changed", [False, True])
def test_a_process_gets_its_old_settings_again_if_they_were_others(tmp_path: Path, changed: bool) -> None:
    settings, file = loaded(tmp_path, model=str(tiny.CHECKPOINT), combined=1, api_key=["key"])
    cluster, said = Started(settings, crashed={"router-0"}), list[str]()
    if changed:
        file.write_text(file.read_text().replace('key"]', 'other"]'))
    with pytest.raises(CPDError, match="has died"):
        changes_of(cluster, settings).restart({"names": ["router-0"]}, said.append)
    assert cluster.restarted == ["router-0"] * (1 + changed)
    assert any("it gets the old ones again" in sentence for sentence in said) == changed


def test_a_restart_goes_on_without_a_process_whose_machine_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = loaded(tmp_path, model=str(tiny.CHECKPOINT), combined=3)
    cluster, said, waited = Started(settings, lost={"combined-1"}), list[str](), list[str]()

    def use(state: ClusterState, workers: dict[str, int], routers: object) -> bool:
        waited.extend(workers)
        return True

    monkeypatch.setattr(module, "has_workers", use)
    changes_of(cluster, settings).restart({"names": []}, said.append)
    assert cluster.restarted == ["combined-0", "combined-1", "combined-2", "router-0"]
    assert waited == ["combined-0", "combined-2"]
    assert "combined-1 has lost its machine: it gets the settings when Ray has room for it" in said
    assert said[-1] == "Restarted combined-0, combined-2, router-0"


def test_changed_numbers_of_a_model_s_workers_do_not_stop_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [{"name": name, "model": str(tiny.CHECKPOINT), "combined": 2} for name in ("one", "two")]
    file = tmp_path / "cpd.yaml"
    file.write_text(to_json({"secret_file": str(secret_file()), "models": models}).decode())
    settings, said = ClusterSettings.load({}, file), list[str]()
    monkeypatch.setattr(module, "has_workers", lambda *_: True)
    changes, arguments = changes_of(Started(settings), settings), {"names": ["one-combined-0"]}
    file.write_text(file.read_text().replace('"combined":2', '"combined":3', 1))
    changes.restart(arguments, said.append)
    assert said[0] == "combined and prefill of models in the config file: not changed by a restart; use `cpd scale`"
    file.write_text(file.read_text().replace('"name":"two"', '"name":"three"'))
    with pytest.raises(ConfigError, match="models can't change"):
        changes.restart(arguments, print)


def test_popular_workers_that_would_keep_another_model_asleep_for_ever_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popular = {"name": "one", "model": str(tiny.CHECKPOINT), "fairness": {"popular": True}}
    models = [popular, {"name": "two", "model": str(tiny.CHECKPOINT)}]
    file = tmp_path / "cpd.yaml"
    given = {"models": models, "device": "cpu", "kv_memory": "64MiB", "device_memory": "160MiB"}
    file.write_text(to_json({"secret_file": str(secret_file()), **given}).decode())
    settings = ClusterSettings.load({}, file)
    monkeypatch.setattr(module, "check_places", lambda *_: None)
    changes, refused = changes_of(Started(settings), settings), "two takes .* it could never be awake"
    with pytest.raises(ConfigError, match=refused):
        changes.scale({"model": "one", "combined": 2}, print)
    file.write_text(file.read_text().replace('"64MiB"', '"100MiB"'))
    with pytest.raises(ConfigError, match=refused):
        changes.restart({"names": []}, print)
