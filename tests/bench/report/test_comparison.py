import pytest

from bench.report.comparison import Figure, differences, figures
from tests.bench.report.synthetic import Server, synthetic_result


def _figure(*, lower_is_better: bool | None = True, first: tuple[float, float] | None = (9.0, 11.0)) -> Figure:
    intervals = [first, (7.0, 8.5), (9.0, 12.0), (19.0, 21.0), None]
    return Figure("ITL p50, ms", lower_is_better, [10.0, 8.0, 10.5, 20.0, None], intervals)


def test_ratios_are_to_the_first_run() -> None:
    assert [_figure().ratio(run) for run in range(5)] == [1.0, 0.8, 1.05, 2.0, None]


def test_no_ratio_to_nothing() -> None:
    assert Figure("failed", True, [0.0, 3.0], [None, None]).ratio(1) is None


def test_only_intervals_that_are_apart_make_a_difference() -> None:
    assert [_figure().overlap(run) for run in range(1, 5)] == [False, True, False, None]
    assert [_figure().better(run) for run in range(1, 5)] == [True, None, False, None]


def test_less_than_a_percent_is_no_difference() -> None:
    figure = Figure("ITL p50, ms", True, [8.00, 8.04], [(7.99, 8.01), (8.03, 8.05)])
    assert figure.overlap(1) is False
    assert figure.better(1) is None


def test_more_throughput_is_better() -> None:
    assert [_figure(lower_is_better=False).better(run) for run in (1, 3)] == [False, True]


@pytest.mark.parametrize("figure", [_figure(first=None), _figure(lower_is_better=None)])
def test_what_is_unknown_or_neutral_is_neither_better_nor_worse(figure: Figure) -> None:
    assert [figure.better(run) for run in range(1, 5)] == [None] * 4


def test_a_faster_server_is_better() -> None:
    runs = [
        synthetic_result("slow", Server(stall_s=None), requests=60),
        synthetic_result("fast", Server(speed=2.0, stall_s=None), requests=60, seed=1),
    ]
    rows = {figure.name: figure for figure in figures(runs)}
    assert rows["ITL p50, ms"].ratio(1) == pytest.approx(0.5, rel=0.05)
    assert rows["ITL p50, ms"].better(1) is True


def test_a_figure_that_no_run_has_is_left_out() -> None:
    without_usage = synthetic_result(server=Server(tells_usage=False), requests=20)
    names = {figure.name for figure in figures([without_usage, without_usage])}
    assert "ITL p50, ms" in names
    assert names.isdisjoint({"TPOT p50, ms", "Output tokens/s", "Cached prompt tokens, %"})


def test_another_load_is_distinguished_from_another_server() -> None:
    first, second = synthetic_result(requests=20), synthetic_result(requests=20)
    second.settings |= {"url": "http://elsewhere", "rate": 16.0, "json_file": "b.json", "output_len": "64"}
    found = differences([first, second])
    assert [(one.name, one.same_load) for one in found] == [("output-len", False), ("rate", False), ("url", True)]
    assert found[0].values == ["-", "64"]


def test_equal_settings_do_not_differ() -> None:
    assert differences([synthetic_result(requests=20), synthetic_result(requests=20, seed=1)]) == []
