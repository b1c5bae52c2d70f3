import pytest

from bench.report.text import count, interval, milliseconds, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.0214, "0.021"),
        (0.4, "0.40"),
        (8.126, "8.13"),
        (41.25, "41.2"),
        (-41.25, "-41.2"),
        (123.4, "123"),
        (1234.5, "1,234"),
        (3, "3"),
        (12_345, "12,345"),
    ],
)
def test_a_number_has_the_digits_that_count(value: float | None, text: str) -> None:
    assert number(value) == text


def test_long_times_are_in_seconds() -> None:
    assert [milliseconds(value) for value in (None, 9.1, 9_999.0, 12_340.0)] == ["-", "9.10 ms", "9,999 ms", "12.3 s"]


def test_shares_intervals_and_counts() -> None:
    assert (percent(None), percent(0.123)) == ("-", "12.3 %")
    assert (interval(None), interval((8.9, 1300.0))) == ("", "8.90-1,300")
    assert (count(1, "request"), count(2_000, "request")) == ("1 request", "2,000 requests")
