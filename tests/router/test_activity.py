from router.activity import Activity


def test_the_figures_are_those_since_the_last_time() -> None:
    recent = Activity()
    recent.calls, recent.errors, recent.tokens = 4, 1, 250
    recent.ttfts_ms.extend([10.0, 30.0, 20.0])
    assert recent.take(10.0) == {"calls": 4, "errors": 1, "tokens_per_s": 25.0, "ttft_p50_ms": 20.0}
    assert recent.take(10.0) == {}
