"""Profiles are found by name in any directory, or by path."""

from pathlib import Path

import pytest

from cpd.common.errors import ConfigError
from cpd.performance.model import Profile
from cpd.performance.profiles import absolute_profile, bundled_profiles, find_profile

NAMES = ["h200-llama3-8b", "h200-qwen3-4b", "h200-qwen3-8b", "instant"]


def test_the_bundled_profiles_are_found_by_name() -> None:
    assert bundled_profiles() == NAMES
    assert {Profile.load(name).device for name in NAMES} == {"NVIDIA H200", "instant"}


def test_a_path_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Profile.load("instant").save(Path("p.json"))
    assert Profile.load("p.json") == Profile.load(tmp_path / "p.json") == Profile.load("instant")


def test_a_bundled_name_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("instant").write_text("{}")
    assert find_profile("instant").parent != tmp_path
    assert find_profile("./instant") == Path("instant")


def test_an_absolute_profile_works_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_profile("p.json") == str(tmp_path / "p.json")
    assert absolute_profile("instant") == "instant"
    assert absolute_profile("") == ""


@pytest.mark.parametrize("profile", ["", ".", "h100", "h200-qwen3-8b.json"])
def test_an_unknown_name_is_one_sentence_with_all_names(profile: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Profile.load(profile)
    assert str(raised.value).endswith(", ".join(NAMES))
    assert "\n" not in str(raised.value)
