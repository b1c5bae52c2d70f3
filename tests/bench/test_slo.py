import pytest

from bench.metrics import summarise
from bench.record import Failure, Record
from bench.result import Request
from bench.slo import Slo
from cpd.common.errors import ConfigError
from tests.bench.records import completed, failed


def row(record: Record) -> Request:
    (request,) = summarise([record], start_s=0.0, slo=None, offered_per_s=None)[1]
    return request


def test_limits_are_read_in_any_order_with_spaces() -> None:
    assert Slo.parse(" itl = 50 , ttft=2e3") == Slo(ttft=2000, itl=50)
    assert Slo.parse("e2e=1,tpot=0.5") == Slo(e2e=1, tpot=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "slo: '' is not one of ttft=MS, itl=MS, tpot=MS, e2e=MS"),
        ("ttft=1,", "slo: '' is not one of"),
        ("latency=3", "slo: 'latency=3' is not one of"),
        ("ttft", "slo: ttft= is not a positive number of milliseconds"),
        ("ttft=fast", "slo: ttft=fast is not a positive number"),
        ("ttft=0", "slo: ttft=0 is not a positive number"),
        ("ttft=-5", "slo: ttft=-5 is not a positive number"),
        ("ttft=nan", "slo: ttft=nan is not a positive number"),
        ("ttft=inf", "slo: ttft=inf is not a positive number"),
        ("ttft=1,ttft=2", "slo: ttft is given twice"),
    ],
)
def test_another_form_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Slo.parse(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft=100", True),
        ("ttft=99", False),
        ("tpot=10", True),
        ("tpot=9", False),
        ("e2e=120", True),
        ("e2e=119", False),
        ("itl=10", True),
        ("itl=9", False),
        ("ttft=100,e2e=119", False),
    ],
)
def test_a_request_must_be_within_every_limit(limits: str, good: bool) -> None:
    assert Slo.parse(limits).good(row(completed(ttft_s=0.1, gaps_s=[0.01, 0.01]))) is good


def test_one_long_gap_in_a_thousand_is_within_the_percentile_but_one_in_fifty_is_not() -> None:
    limit = Slo(itl=20)
    assert limit.good(row(completed(gaps_s=[0.01] * 999 + [1.0])))
    assert not limit.good(row(completed(gaps_s=[0.01] * 49 + [1.0])))


def test_an_answer_of_one_token_breaks_no_limit_on_what_it_does_not_have() -> None:
    assert Slo(itl=1, tpot=1).good(row(completed(gaps_s=[])))


def test_a_failed_request_is_never_good() -> None:
    assert not Slo(ttft=1000).good(row(failed(Failure.INCOMPLETE, content_s=[0.1])))
