"""Settings of models that share a device."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpd.common.errors import ConfigError
from cpd.common.residency_settings import Fairness, SleepSettings
from cpd.common.settings import ClusterSettings, RouterSettings

SHARED = """\
device-memory: 4GiB
staging-memory: 1GiB
residency: predicted
fairness: {min-runtime: 20s}
sleep: {idle_timeout: 5m}
models:
  - name: usual
    model: /models/u
  - name: chosen
    model: /models/c
    fairness: {popular: true, max_wait_time: 500ms}
    sleep: {drain-timeout: 10}
"""


def models(*given: dict[str, Any], **settings: Any) -> ClusterSettings:
    entries = [{"name": f"m{index}", "model": "x", **one} for index, one in enumerate(given)]
    return ClusterSettings.load({"models": json.dumps(entries), **settings})


def test_a_model_has_its_own_sections_and_else_those_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SHARED)
    settings = ClusterSettings.load({}, file)
    settings.check_models()
    assert (settings.device_memory, settings.staging_memory, settings.residency) == (4 << 30, 1 << 30, "predicted")
    usual, chosen = settings.each_model()
    assert (usual.fairness, usual.sleep) == (Fairness(min_runtime_s=20), SleepSettings(idle_timeout_s=300))
    assert chosen.fairness == Fairness(popular=True, max_wait_time_s=0.5)
    assert chosen.sleep == SleepSettings(drain_timeout_s=10)


def test_a_cluster_of_one_model_has_sections_too() -> None:
    given = {"model": "m", "prefill": 0, "device_memory": "1GiB", "fairness": '{"min-runtime": "1s"}'}
    settings = ClusterSettings.load(given)
    settings.check_models()
    assert settings.fairness.min_runtime_s == 1


def test_a_router_takes_the_sections_of_models() -> None:
    given = json.dumps([{"name": "a", "model": "/a", "fairness": {"popular": True}}])
    assert RouterSettings.load({"models": given}).models[0].fairness == Fairness(popular=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fairness": '{"min_runtim": 1}'}, r"no setting 'fairness\.min-runtim'; did you mean 'fairness\.min-runtime'"),
        ({"fairness": '{"min_runtime": "soon"}'}, r"fairness\.min-runtime: not a duration .* \(got 'soon'\)"),
        ({"sleep": '{"idle_timeout": -1}'}, r"sleep\.idle-timeout: .* greater than or equal to 0"),
        ({"device_memory": 0}, "device-memory: .* greater than 0"),
        (
            {"models": json.dumps([{"name": "a", "model": "x", "sleep": {"idle": 1}}])},
            r"no setting 'models\.0\.sleep\.idle'",
        ),
        (
            {"models": json.dumps([{"name": "a", "model": "x", "fairness": {"max_wait_time": "x"}}])},
            r"models\.0\.fairness\.max-wait-time: not a duration",
        ),
    ],
)
def test_wrong_values_are_named_in_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSettings.load(given)


@pytest.mark.parametrize(
    "given",
    [{"staging_memory": "1GiB"}, {"residency": "predicted"}, {"fairness": "{}"}, {"sleep": '{"idle_timeout": 1}'}],
)
def test_without_a_shared_device_its_settings_are_refused(given: dict[str, Any]) -> None:
    settings = ClusterSettings.load({"model": "m", "prefill": 0, **given})
    if given == {"fairness": "{}"}:
        settings.check_models()  # as if it were not given
        return
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} is for models that share a device"):
        settings.check_models()


def test_without_a_shared_device_sections_of_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="fairness of models is for models that share a device"):
        models({"fairness": {"popular": True}}).check_models()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cuda"}, "--device-memory is for machines without GPUs so far"),
        ({"simulate": "instant"}, "--simulate does not work with --device-memory"),
        ({"planner": "act"}, "--planner does not work with --device-memory"),
        ({"prefill": 1}, "--prefill is 1, and must be 0 with --device-memory"),
    ],
)
def test_what_does_not_work_on_a_shared_device_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSettings.load({"model": "m", "prefill": 0, "device_memory": "1GiB", **given}).check_models()


def test_prefill_workers_of_one_of_several_models_are_refused_on_a_shared_device() -> None:
    with pytest.raises(ConfigError, match="`prefill` of m1 in `models:` is 2, and must be 0"):
        models({}, {"prefill": 2}, device_memory="1GiB").check_models()
