"""Descriptions that simulated workers give of their engines."""

from pathlib import Path

import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import WorkerSettings
from cpd.performance.model import Profile
from engine.model.config import ModelConfig, load_config
from models import tiny
from sim.device.runner import VirtualTime
from simulated_workers.engine import CONTEXT, Load, make_loader
from worker.context import LoadedEngine

PAGE = 1 << 20


@pytest.fixture
def config() -> ModelConfig:
    return load_config(tiny.CHECKPOINT)


def load(make: Load, settings: WorkerSettings) -> LoadedEngine:
    return make(settings, VirtualTime())


def profile(**changes: int) -> Profile:
    return Profile.load("instant").model_copy(update={"page_bytes": PAGE, **changes})


def test_pages_are_as_many_as_fit_into_the_kv_memory(config: ModelConfig) -> None:
    loaded = load(make_loader(profile(), config), WorkerSettings.load({"kv_memory": "100MiB"}))
    assert (loaded.memory.num_pages, loaded.page_bytes) == (100, PAGE)
    assert loaded.limits.max_model_len == 1600


def test_without_a_kv_memory_they_are_as_many_as_the_device_has(config: ModelConfig) -> None:
    make = make_loader(profile(num_pages=50_000), config)
    loaded = load(make, WorkerSettings.load({}))
    assert loaded.memory.num_pages == 50_000
    assert loaded.limits.max_model_len == CONTEXT
    assert load(make, WorkerSettings.load({"max_model_len": 100_000})).limits.max_model_len == 100_000
    for given, pages in (("64MiB", 64), ("1GiB", 1024)):  # the second is the default of real workers
        assert load(make, WorkerSettings.load({"kv_memory": given})).memory.num_pages == pages


def test_a_profile_that_knows_no_page_size_has_pages_of_the_checkpoint(config: ModelConfig) -> None:
    loaded = load(make_loader(Profile.load("instant"), config), WorkerSettings.load({}))
    assert loaded.page_bytes == config.page_bytes("bfloat16")
    assert loaded.limits.vocab_size == config.vocab_size


def test_too_few_pages_are_refused(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="give at least 4194304 bytes"):
        load(make_loader(profile(), config), WorkerSettings.load({"kv_memory": 1000}))


def test_there_is_no_host_memory_for_pages_with_nothing_in_them(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="--host-kv-memory"):
        load(make_loader(profile(), config), WorkerSettings.load({"host_kv_memory": "1GiB"}))


def test_there_is_no_memory_to_share(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="--device-memory"):
        load(make_loader(profile(), config), WorkerSettings.load({"device_memory": "1GiB"}))


def test_what_the_engine_predicts_with_can_be_another_profile(config: ModelConfig, tmp_path: Path) -> None:
    known = profile(units=7)
    known.save(tmp_path / "known.json")
    make = make_loader(profile(units=3), config)
    assert load(make, WorkerSettings.load({})).profile.units == 3
    assert load(make, WorkerSettings.load({"profile": str(tmp_path / "known.json")})).profile == known


def test_workers_exchange_pages_where_pages_have_one_size(config: ModelConfig) -> None:
    settings = WorkerSettings.load({})
    one, same, other = (
        load(make_loader(profile(page_bytes=size), config), settings).fingerprint for size in (PAGE, PAGE, 2 * PAGE)
    )
    assert one == same != other
    assert len(one) == 16
