import time

from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopMatcher

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def _run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include=include)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.matched:
            return text, True
    return text + matcher.flush(), False


@given(text=TEXT, stops=STOPS, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _run(stops, pieces) == _run(stops, list(text)) == _run(stops, [text])


@given(text=TEXT, stops=STOPS)
def test_ends_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    ends = [(end, -len(stop)) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    assert _run(stops, [text]) == (expected, bool(ends))
    assert _run(stops, [text], include=True) == (text[: min(ends)[0]] if ends else text, bool(ends))


@given(text=TEXT, stops=STOPS)
def test_holds_back_only_what_may_be_the_start_of_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = matcher.push(text)
    if not matcher.matched:
        held = text[len(released) :]
        assert released + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_many_pieces_is_found() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("say S", "T", "O", "no ST", "OP more")] == ["say ", "", "", "STOno ", ""]
    assert matcher.matched


def test_text_that_is_held_back_for_long_costs_little() -> None:
    matcher = StopMatcher([*("ab" + "c" * 1_022 for _ in range(31)), "a" * 1_023 + "b"])
    begin = time.thread_time()
    held = 4_000 - sum(len(matcher.push("aaaa")) for _ in range(1_000))
    assert time.thread_time() - begin < 2.0  # nearly always 0.1 s
    assert held == 1_023
