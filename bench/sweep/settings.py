"""The settings of `cpd bench sweep`."""

from pydantic import Field

from bench.settings import LoadSettings


class SweepSettings(LoadSettings):
    """One workload at several loads."""

    rates: str = Field("", description="Open loops at these rates, such as 1,2,4,8.")
    concurrencies: str = Field("", description="Closed loops with this many streams, such as 1,4,16,64.")
    num_requests: int | None = Field(
        None, ge=1, description="Sessions to send at each load; by default those within --duration."
    )
    duration: float | None = Field(
        None, gt=0, description="Stop sending after this many seconds at each load; 20 unless --num-requests is given."
    )
    rate: float | None = Field(None, gt=0, description="find-max-rate: initial rate; 1 by default.")
    find_max_rate: bool = Field(
        False,
        description="Search the highest rate at which --slo-share of the requests meet --slo, from --rate on.",
    )
    slo_share: float = Field(0.99, gt=0, lt=1, description="find-max-rate: share of requests that must meet --slo.")
    precision: float = Field(0.05, gt=0, lt=1, description="find-max-rate: relative precision of the rate.")
