"""Properties that all workloads share."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.tokens import Texts
from cpd.common.errors import ConfigError
from tests.bench.workloads.making import common_tokens, exact, first_texts, workload

KINDS = ("random", "shared-prefix", "multi-turn", "trace", "jsonl")
SESSIONS = 12


@pytest.fixture(params=KINDS)
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The flags of a workload of each kind, with at least SESSIONS sessions."""
    path = tmp_path / "file.jsonl"
    traced = {"timestamp": 1, "input_length": 300, "output_length": 5, "hash_ids": [1]}
    row = json.dumps(traced if request.param == "trace" else {"prompt": "the same prompt " * 20})
    path.write_text(f"{row}\n" * SESSIONS)
    return {"workload": request.param, "file": path, "input_len": "uniform:100,300", "output_len": "normal:50,5"}


@pytest.mark.parametrize("texts", [exact, lambda: Texts.measured(1.3, 9)], ids=["exact", "measured"])
def test_the_same_seed_gives_the_same_sessions_in_any_order(flags: dict[str, Any], texts: Any) -> None:
    one, other = workload(seed=5, texts=texts(), **flags), workload(seed=5, texts=texts(), **flags)
    forwards = [one.session(index) for index in range(SESSIONS)]
    backwards = [other.session(index) for index in reversed(range(SESSIONS))]
    assert forwards == backwards[::-1]
    assert one.priming() == other.priming()
    assert one.times_s == other.times_s


def test_prompts_of_another_seed_begin_with_other_words(flags: dict[str, Any]) -> None:
    ours, theirs = (first_texts(workload(seed=seed, **flags), SESSIONS) for seed in (1, 2))
    assert all(common_tokens(one, other) < 8 for one in ours for other in theirs)


@pytest.mark.parametrize("flag", ["input_len", "output_len", "later_len"])
def test_an_unreadable_length_is_named_as_on_the_command_line(flag: str) -> None:
    flags: dict[str, Any] = {flag: "some"}
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        workload(**flags)
