"""The table behaves like a dict."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prefix_index import block_table as blocktable
from router.prefix_index.block_table import BlockTable, Hashes

# few low bits, so that buckets overflow
keys = st.one_of(st.integers(1, 40), st.integers(1, 40).map(lambda key: key << 48), st.integers(1, 2**64 - 1))
batches = st.lists(st.tuples(st.lists(keys, max_size=60), st.integers(0, 3)), max_size=30)


@pytest.fixture(params=["each", "together"], autouse=True, scope="module")
def how(request: pytest.FixtureRequest) -> Iterator[None]:
    """The method for all updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocktable, "_TOGETHER", 1 if request.param == "together" else 1 << 30)
        yield


def _hashes(*values: int) -> Hashes:
    return np.array(values, dtype=np.uint64)


class _To(dict[int, int]):
    """Maps every value to the same one."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __missing__(self, old: int) -> int:
        return self._value


def _check(table: BlockTable, model: dict[int, int]) -> None:
    assert len(table) == len(model)
    assert table.leading(_hashes(*model)) == list(model.values())
    assert not any(table.lacks(key.to_bytes(8, "little")) for key in model)


@given(batches)
def test_updates_like_a_dict(batches: list[tuple[list[int], int]]) -> None:
    table, model = BlockTable(), dict[int, int]()
    for batch, value in batches:
        before = Counter[int]()
        for key in batch:
            before[model.get(key, 0)] += 1
            model[key] = value
        assert table.update(_hashes(*batch).tobytes(), _To(value)) == before
        model = {key: value for key, value in model.items() if value}
    _check(table, model)


@given(batches, st.lists(keys, max_size=40))
def test_finds_the_leading_known_hashes(batches: list[tuple[list[int], int]], chain: list[int]) -> None:
    table, model = BlockTable(), dict[int, int]()
    for batch, value in batches:
        table.update(_hashes(*batch).tobytes(), _To(value + 1))
        model.update(dict.fromkeys(batch, value + 1))
    known = next((count for count, key in enumerate(chain) if key not in model), len(chain))
    assert table.leading(_hashes(*chain)) == [model[key] for key in chain[:known]]


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sets(st.integers(1, 9)))
def test_erases_values_while_it_grows(seed: int, doomed: set[int]) -> None:
    table, model = BlockTable(), dict[int, int]()
    rng = np.random.default_rng(seed)

    def put(value: int) -> None:
        some = rng.integers(0, 2**64, 2_000, dtype=np.uint64)
        some[:200] = some[:200] & np.uint64(0xFFF << 40) | np.uint64(1 << 52)  # one bucket
        some = np.unique(some)
        table.update(some.tobytes(), _To(value))
        model.update(dict.fromkeys(some.tolist(), value))

    for value in range(1, 10):
        put(value)
    model = {key: value for key, value in model.items() if value not in doomed}
    for _ in table.erase(sorted(doomed)):
        put(11)
    _check(table, model)


def test_grows_in_small_steps_and_keeps_most_entries_in_its_buckets() -> None:
    table = BlockTable()
    rng = np.random.default_rng(0)
    for _ in range(100):
        table.update(rng.bytes(8_000), _To(1))
    assert len(table) == 100_000
    assert sum(map(len, table._overflow.values())) < 0.02 * len(table)
