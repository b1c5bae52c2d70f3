"""The launcher takes requests for other numbers of processes; tests/e2e/test_page.py tests what becomes of them."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from cpd.common.errors import ConfigError
from cpd.common.scaling import ModelNumbers, ScaleRequest, ScalingMailbox, ScalingReport
from cpd.common.trust import ClusterSecret
from deploy.changes import Changes
from deploy.scaling import scaled_on_request
from tests.router.conftest import eventually
from tests.waiting import DEADLINE_S

SECRET = ClusterSecret("the secret of this cluster")


class Numbers:
    """Stands for the changes of a cluster.

    Attributes:
        asked: What was asked for.
        error: Why a change fails; empty: it does not.
        may_end: A change waits for it.
    """

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.error = ""
        self.may_end = threading.Event()
        self.may_end.set()

    def numbers(self) -> tuple[list[ModelNumbers], int]:
        """As `Changes.numbers`."""
        return [{"model": "one", "combined": 1 + len(self.asked), "prefill": 0}], 1

    def scale(self, arguments: Mapping[str, Any], tell: Callable[[str], None]) -> None:
        """As `Changes.scale`."""
        self.asked.append(arguments)
        tell("Starting one-combined-1")
        assert self.may_end.wait(DEADLINE_S)
        if self.error:
            raise ConfigError(self.error)


def asks(report: ScalingReport, request_id: str = "1", **changed: Any) -> ScaleRequest:
    wanted = {"id": request_id, "launch": report["launch"], "model": "one", "combined": 2, "prefill": None}
    return cast(ScaleRequest, {**wanted, "router": None, **changed})


@pytest.mark.parametrize("error", ["", "no room"])
async def test_a_request_is_carried_out_once_and_reported(redis_url: str, error: str) -> None:
    numbers, busy, said = Numbers(), threading.Lock(), list[str]()
    numbers.error = error
    numbers.may_end.clear()
    async with Redis.from_url(redis_url) as redis:
        mailbox = ScalingMailbox(redis, f"scaled-{error}", SECRET)

        async def reported(**values: Any) -> bool:
            report = await mailbox.read_report()
            return report is not None and values.items() <= report.items()

        with scaled_on_request(redis_url, f"scaled-{error}", SECRET, cast(Changes, numbers), busy, said.append):
            await eventually(lambda: reported(changing=False, routers=1, request=""))
            report = await mailbox.read_report()
            assert report is not None
            await mailbox.write_request(asks(report))
            await eventually(lambda: reported(changing=True, request="1", step="Starting one-combined-1"))
            assert busy.locked()
            numbers.may_end.set()
            await eventually(lambda: reported(changing=False, error=error, models=numbers.numbers()[0]))
            assert said == ["Starting one-combined-1", *([f"error: {error}"] if error else [])]

            await mailbox.write_request(asks(report))  # somebody repeats it
            await mailbox.write_request(asks(report, "2", launch="an earlier one"))
            await mailbox.write_request(asks(report, "3"))
            await eventually(lambda: reported(changing=False, request="3"))
            assert [one["id"] for one in numbers.asked] == ["1", "3"]


async def test_a_request_that_is_not_signed_or_asks_for_what_can_not_be_is_ignored(redis_url: str) -> None:
    numbers = Numbers()
    async with Redis.from_url(redis_url) as redis:
        mailbox, forged = (ScalingMailbox(redis, "forged", secret) for secret in (SECRET, ClusterSecret("x" * 32)))
        with scaled_on_request(redis_url, "forged", SECRET, cast(Changes, numbers), threading.Lock(), lambda _: None):

            async def reports() -> bool:
                return await mailbox.read_report() is not None

            await eventually(reports)
            report = await mailbox.read_report()
            assert report is not None
            await forged.write_request(asks(report))
            assert await mailbox.read_request() is None
            await mailbox.write_request(asks(report, combined=0))
            assert await mailbox.read_request() is None
            assert await forged.read_report() is None
    assert numbers.asked == []
