"""Groups of prompts with a common prefix."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from tests.bench.workloads.making import OVERHEAD, common_tokens, first_texts, prompt_len, workload


@pytest.mark.parametrize("hit_rate", [0.1, 0.5, 0.9])
def test_a_primed_cache_holds_the_set_share_of_every_prompt(hit_rate: float) -> None:
    made = workload(workload="shared-prefix", prefix_groups=4, hit_rate=hit_rate, input_len="512")
    primed = [session.turns[0].text for session in made.priming()]
    assert len(primed) == 4
    for text in first_texts(made, 40):
        assert prompt_len(text) == 512
        before_text = OVERHEAD - 5  # the tokens that the template puts first are in the cache, too
        cached = before_text + max(common_tokens(prime, text) for prime in primed)
        assert 0 <= cached - round(hit_rate * 512) < 16  # a server that keeps blocks of 16 has the set share


def test_prompts_of_a_group_share_its_beginning_and_no_more() -> None:
    made = workload(workload="shared-prefix", prefix_groups=3, hit_rate=0.5, input_len="400")
    prefixes = [session.turns[0].text for session in made.priming()]
    groups = defaultdict(list)
    for text in first_texts(made, 60):
        (prefix,) = (prefix for prefix in prefixes if text.startswith(prefix + " "))
        groups[prefix].append(text.removeprefix(prefix))
    assert len(groups) == 3
    for suffixes in groups.values():
        assert all(common_tokens(one, other) < 8 for one, other in pairwise(suffixes))


def test_with_spread_lengths_the_share_holds_on_the_whole() -> None:
    made = workload(workload="shared-prefix", hit_rate=0.5, input_len="normal:512,64")
    primes = {session.turns[0].input_len - 5 for session in made.priming()}
    assert len(primes) == 1
    lengths = [made.session(index).turns[0].input_len for index in range(500)]
    assert primes.pop() * len(lengths) / sum(lengths) == pytest.approx(0.5, rel=0.03)
    assert np.std(lengths) > 50


def test_a_prompt_no_longer_than_the_prefix_still_has_a_text_of_its_own() -> None:
    made = workload(workload="shared-prefix", hit_rate=0.9, input_len="uniform:10,200")
    prefixes = tuple(session.turns[0].text for session in made.priming())
    assert all(text.startswith(prefixes) and text not in prefixes for text in first_texts(made, 100))


def test_a_rate_of_zero_shares_nothing() -> None:
    made = workload(workload="shared-prefix", hit_rate=0.0)
    assert not made.priming()
    for one, other in pairwise(first_texts(made)):
        assert common_tokens(one, other) < 8


def test_priming_asks_for_one_token() -> None:
    made = workload(workload="shared-prefix", prefix_groups=2)
    assert [session.turns[0].output_len for session in made.priming()] == [1, 1]
