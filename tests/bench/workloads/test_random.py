"""Independent prompts."""

from itertools import pairwise

import numpy as np

from bench.tokens import Texts
from tests.bench.workloads.making import common_tokens, first_texts, prompt_len, workload


def test_prompts_have_the_wanted_length_template_included() -> None:
    made = workload(input_len="512", output_len="7")
    for index in range(20):
        session = made.session(index)
        (turn,) = session.turns
        assert session.index == index
        assert prompt_len(turn.text) == turn.input_len == 512
        assert turn.output_len == 7
        assert not session.opening


def test_lengths_follow_their_distributions() -> None:
    made = workload(input_len="uniform:100,200", output_len="normal:50,5")
    turns = [made.session(index).turns[0] for index in range(300)]
    assert all(prompt_len(turn.text) == turn.input_len for turn in turns)
    assert 95 < min(turn.input_len for turn in turns) < 110
    assert 190 < max(turn.input_len for turn in turns) <= 200
    assert 48 < np.mean([turn.output_len for turn in turns]) < 52


def test_prompts_have_no_beginning_in_common() -> None:
    for one, other in pairwise(first_texts(workload())):
        assert common_tokens(one, other) < 8


def test_a_prompt_shorter_than_the_template_still_says_something() -> None:
    (turn,) = workload(input_len="3").session(0).turns
    assert turn.text
    assert turn.input_len == 3


def test_it_has_no_end_no_times_and_nothing_to_prime() -> None:
    made = workload()
    assert made.size is None
    assert made.times_s is None
    assert not made.priming()
    assert made.session(10**9).turns


def test_lengths_are_about_right_without_a_tokenizer() -> None:
    made = workload(texts=Texts.measured(tokens_per_word=1.6, overhead=9), input_len="512")
    words = [len(text.split()) for text in first_texts(made)]
    assert all(abs(1.6 * number + 9 - 512) < 1.6 for number in words)
