"""Every dependency of pyproject.toml is pinned in one of the two locks."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0].replace("_", "-").lower() for line in requirements}


def locked(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    assert all("==" in line for line in lines)
    return names(lines)


def test_what_runs_and_what_tests_need_is_pinned_once() -> None:
    run, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert names(PROJECT["dependencies"]) <= run
    assert names(PROJECT["optional-dependencies"]["dev"]) <= dev
    assert not run & dev
