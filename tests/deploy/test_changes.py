"""What needs no Ray; the changes themselves are tested in tests/e2e/test_up.py."""

from cpd.common.settings import ClusterSettings
from deploy.changes import FIXED, STARTS, Plan, start_error
from deploy.process import ProcessState
from deploy.processes import LAUNCH_MARK
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
