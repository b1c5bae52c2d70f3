"""Conversations."""

from itertools import pairwise

import pytest

from cpd.common.errors import ConfigError
from tests.bench.workloads.making import common_tokens, prompt_len, tokens, workload


def test_the_first_turn_and_later_ones_have_their_lengths() -> None:
    made = workload(workload="multi-turn", turns=4, input_len="300", later_len="50", output_len="20")
    first, *later = made.session(3).turns
    assert len(later) == 3
    assert prompt_len(first.text) == 300
    assert [tokens(turn.text) for turn in later] == [50, 50, 50]


def test_input_len_is_the_conversation_so_far_and_the_new_text() -> None:
    made = workload(workload="multi-turn", turns=3, input_len="300", later_len="50", output_len="20")
    assert [turn.input_len for turn in made.session(0).turns] == [300, 370, 440]


def test_the_user_thinks_before_every_turn_but_the_first() -> None:
    made = workload(workload="multi-turn", turns=3, think_s="uniform:1,2")
    first, *later = made.session(0).turns
    assert first.think_s == 0
    assert all(1 <= turn.think_s <= 2 for turn in later)


def test_conversations_and_turns_have_no_text_in_common() -> None:
    made = workload(workload="multi-turn", turns=5)
    texts = [turn.text for index in range(5) for turn in made.session(index).turns]
    assert all(common_tokens(one.strip(), other.strip()) < 8 for one, other in pairwise(texts))


def test_a_later_text_is_kept_apart_from_the_answer_before_it() -> None:
    assert all(turn.text.startswith(" ") for turn in workload(workload="multi-turn").session(0).turns[1:])


@pytest.mark.parametrize(("preset", "first", "later"), [("heavy", 2048, 512), ("light", 512, 256)])
def test_presets_set_the_lengths(preset: str, first: int, later: int) -> None:
    turns = workload(workload="multi-turn", preset=preset).session(0).turns
    assert prompt_len(turns[0].text) == first
    assert {tokens(turn.text) for turn in turns[1:]} == {later}
    assert {turn.output_len for turn in turns} == {256}


def test_a_preset_and_a_length_of_ones_own_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"--preset heavy sets --later-len to 512"):
        workload(workload="multi-turn", preset="heavy", later_len="100")
    with pytest.raises(ConfigError, match="multi-turn"):
        workload(workload="random", preset="heavy")


def test_an_unreadable_pause_is_named() -> None:
    with pytest.raises(ConfigError, match="--think-s"):
        workload(workload="multi-turn", think_s="long")
