import pytest
from pydantic import ValidationError

from cpd.residency.snapshot import Fairness, SleepSettings


def test_durations_are_seconds_or_have_a_unit() -> None:
    assert Fairness.model_validate({"min_runtime": "10s", "max_wait_time": "500ms"}) == Fairness(
        min_runtime_s=10, max_wait_time_s=0.5
    )
    assert SleepSettings.model_validate({"idle_timeout": "1h", "drain_timeout": "2m"}) == SleepSettings(
        idle_timeout_s=3600, drain_timeout_s=120
    )
    assert SleepSettings.model_validate({"idle_timeout": 3, "drain_timeout": "4"}).drain_timeout_s == 4


@pytest.mark.parametrize("text", ["soon", "10 days", "-1s", "nan", "inf"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        Fairness.model_validate({"min_runtime": text})
