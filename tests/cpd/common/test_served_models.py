"""Settings of a cluster that serves several models."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings, RouterSettings

SEVERAL = """\
kv-memory: 2GiB
max-model-len: 1000
models:
  - name: small
    model: /models/s
  - name: large
    aliases: [org/large, l]
    model: /models/l
    dtype: bfloat16
    max-model-len: 500
    kv-memory: 8GiB
    prefill: 2
    combined: 3
"""


def load(*models: dict[str, Any], **settings: Any) -> ClusterSettings:
    return ClusterSettings.load({"models": json.dumps(models), **settings})


def test_a_model_has_its_own_settings_and_else_those_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(SEVERAL)
    settings = ClusterSettings.load({}, file)
    settings.check_models()
    small, large = settings.each_model()
    assert (small.served_model_name, small.model, small.prefill, small.combined) == ("small", "/models/s", 0, 1)
    assert (small.dtype, small.max_model_len, small.kv_memory) == ("auto", 1000, 2 << 30)
    assert (large.served_model_name, large.model, large.prefill, large.combined) == ("large", "/models/l", 2, 3)
    assert (large.dtype, large.max_model_len, large.kv_memory) == ("bfloat16", 500, 8 << 30)
    assert settings.models[1].names == ["large", "org/large", "l"]
    assert (small.models, large.models) == ([], [])


def test_a_cluster_of_one_model_has_its_own_settings_only() -> None:
    settings = ClusterSettings.load({"model": "/models/m", "prefill": 3})
    assert settings.each_model() == [settings]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{"name": "a", "model": "x"}, {"name": "a", "model": "y"}], "models: two models have the name or alias 'a'"),
        (
            [{"name": "a", "model": "x"}, {"name": "b", "model": "y", "aliases": ["c", "a"]}],
            "models: two models have the name or alias 'a'",
        ),
        ([{"name": "a", "model": "x", "aliases": ["a"]}], "models: two models have the name or alias 'a'"),
        ([{"name": "org/a", "model": "x"}], "models.0.name: at most 48 letters, .* any other name can be an alias"),
        ([{"name": "a"}], "models.0.model: Field required"),
        ([{"name": "a", "modell": "x"}], r"no setting 'models\.0\.modell'; did you mean 'models\.0\.model'"),
        (
            [{"name": "a", "model": "x"}, {"name": "b", "model": "y", "combined": 0}],
            r"models\.1\.combined: .* \(got 0\)",
        ),
        ({"name": "a", "model": "x"}, "models: Input should be a valid list"),
    ],
)
def test_wrong_entries_are_refused_in_one_sentence(models: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSettings.load({"models": json.dumps(models)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "/models/m"}, "--model is for one model"),
        ({"served_model_name": "m"}, "--served-model-name is for one model"),
        ({"combined": 2}, "--combined is for one model: give each entry of `models:` its own `combined`"),
        ({"prefill": 0}, "--prefill is for one model"),
        ({"planner": "advise"}, "--planner works for one model only"),
        ({"planner": "act"}, "--planner works for one model only"),
        ({"simulate": "instant"}, "--simulate is the profile of one model"),
        ({"profile": "h200-qwen3-8b"}, "--profile is the profile of one model"),
    ],
)
def test_what_works_for_one_model_only_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"name": "a", "model": "x"}, **given).check_models()
    ClusterSettings.load({"model": "x", **given}).check_models()


def test_a_router_takes_the_models_as_json() -> None:
    given = json.dumps([{"name": "a", "model": "/a", "aliases": ["b"]}])
    (model,) = RouterSettings.load({"models": given}).models
    assert (model.names, model.model) == (["a", "b"], "/a")
    with pytest.raises(ConfigError, match="models is not valid JSON"):
        RouterSettings.load({"models": "[{"})
