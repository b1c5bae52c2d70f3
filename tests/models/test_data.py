"""The dialogues: right answers, and nothing of evaluation's in training."""

import re
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tiny.data import requests
from models.tiny.data.arithmetic import difference, total
from models.tiny.data.cases import recall_case, request_case
from models.tiny.data.dialogue import recall, request, small_talk
from models.tiny.data.recall import facts
from models.tiny.data.reserved import is_reserved

numbers = st.integers(0, 999)


def count_words(text: str) -> int:
    return len(text.split())


def assert_steps_are_right(answer: str) -> None:
    for left, right in re.findall(r"((?:\d+ [+-] )+\d+) = (-?\d+)\.", answer):
        assert eval(left) == int(right)
    for x, sign, y in re.findall(r"(?:^|, )(\d) ([<>=]) (\d)", answer):
        assert sign == ("<" if x < y else ">" if x > y else "=")


@given(numbers, numbers)
def test_every_step_of_a_sum_is_right(a: int, b: int) -> None:
    assert_steps_are_right(total(a, b))
    assert total(a, b).endswith(f"So {a} + {b} = {a + b}.")


@given(numbers, numbers)
def test_every_step_of_a_difference_is_right(a: int, b: int) -> None:
    assert_steps_are_right(difference(a, b))
    assert difference(a, b).endswith(f"So {a} - {b} = {a - b}.")
    assert (f"so {b} is larger." in difference(a, b)) == (a < b)


@pytest.mark.parametrize("kind", [kind for kind in requests.KINDS if kind.is_open], ids=lambda kind: kind.name)
def test_requests_of_training_and_of_evaluation_differ(kind: requests.Kind) -> None:
    rng = Random(3)
    trained = {request(rng, kind)[1][0]["content"] for _ in range(200)}
    judged = {request_case(rng, kind).messages[0]["content"] for _ in range(50)}
    assert not trained & judged


def test_facts_are_each_about_another_thing() -> None:
    for seed in range(30):
        known = facts(Random(seed), 100, with_reserved=True)
        assert len({(fact.kind.statement, fact.fields[:-1]) for fact in known}) == len(known)


def test_training_knows_no_reserved_fact() -> None:
    for seed in range(30):
        assert not any(is_reserved(fact.statement) for fact in facts(Random(seed), 100))


@pytest.mark.parametrize(("least", "most"), [(20, 99), (2000, 3960)])
def test_a_recall_case_can_be_answered_from_the_dialogue_and_only_from_it(least: int, most: int) -> None:
    for seed in range(10):
        case = recall_case(Random(seed), least, most, count_words)
        context = "\n".join(message["content"] for message in case.messages)
        assert is_reserved(case.answer)
        assert context.count(case.answer) == 1
        assert case.messages[-1]["role"] == "user"
        assert context.count(".") > 20 or most < 100


def test_turns_alternate() -> None:
    for seed in range(40):
        for dialogue in (small_talk(Random(seed)), recall(Random(seed), 256, count_words)):
            roles = [message["role"] for message in islice(dialogue, 20)]
            turns = roles[1:] if roles[0] == "system" else roles
            assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"] * (len(turns) % 2)


def test_the_same_seed_makes_the_same_dialogue() -> None:
    assert list(islice(small_talk(Random("a")), 50)) == list(islice(small_talk(Random("a")), 50))
