from router.lru import LRU


def test_drops_the_least_recently_used_entries() -> None:
    lru: LRU[str, int] = LRU(3)
    for number, key in enumerate("abc"):
        lru.put(key, number, 1)
    assert lru.get("a") == 0
    lru.put("d", 3, 1)
    assert [lru.get(key) for key in "abcd"] == [0, None, 2, 3]


def test_the_total_size_has_a_limit() -> None:
    lru: LRU[str, int] = LRU(10)
    lru.put("a", 0, 6)
    lru.put("a", 1, 4)
    assert (lru.get("a"), lru.size) == (1, 4)
    lru.put("b", 2, 7)
    assert (lru.get("a"), lru.get("b"), lru.size) == (None, 2, 7)
    lru.put("c", 3, 11)
    assert (lru.get("b"), lru.get("c"), lru.size) == (None, None, 0)
