import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.wordtable import MOST_BYTES, MOST_TOKENS, WordTable

WORDS = st.text(alphabet="ab\0é ", min_size=1, max_size=8).map(str.encode) | st.just(b"a" * MOST_BYTES)
TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=MOST_TOKENS)
LONG = [b"a" * (MOST_BYTES + more) for more in range(1, 10)]


@given(st.dictionaries(WORDS, TOKENS, max_size=40), st.lists(WORDS | st.sampled_from(LONG), min_size=1, max_size=60))
def test_a_word_is_found_with_its_tokens_or_not_at_all(known: dict[bytes, list[int]], wanted: list[bytes]) -> None:
    table = WordTable(bits=6)
    for _ in range(2):
        table.add(known)
    assert len(table) <= len(known)
    lengths = np.array(list(map(len, wanted)))
    slots = table.find(b"".join(wanted), np.cumsum(lengths) - lengths, lengths)
    found = slots >= 0
    assert all(word in known for word, there in zip(wanted, found, strict=True) if there)
    missed = {word for word, there in zip(wanted, found, strict=True) if word in known and not there}
    assert len(missed) <= len(known) - len(table)
    tokens, counts = table.tokens(slots[found])
    expected = [known[word] for word, there in zip(wanted, found, strict=True) if there]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert counts.tolist() == [len(ids) for ids in expected]


def test_what_there_is_room_for_is_remembered() -> None:
    table, words = WordTable(bits=8), {b" %d" % number: [number] for number in range(128)}
    table.add(words)
    lengths = np.array(list(map(len, words)))
    slots = table.find(b"".join(words), np.cumsum(lengths) - lengths, lengths)
    assert np.count_nonzero(slots < 0) == len(words) - len(table) <= 2
