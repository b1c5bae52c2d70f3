"""The sections `fairness:` and `sleep:` of a model that shares a device with others."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(value: object) -> object:
    """Returns seconds for a text such as 500ms, 10s, 5m or 1h."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    except ValueError:
        raise PydanticCustomError("duration", "not a duration such as 500ms, 10s, 5m or 1h") from None


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=1e9, allow_inf_nan=False)]
"""A duration: a number of seconds, or a text with a unit."""


class Fairness(BaseModel):
    """The section `fairness:` of a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    min_runtime_s: Seconds = Field(
        10.0, alias="min_runtime", description="The model serves at least this long before others may displace it."
    )
    max_wait_time_s: Seconds = Field(
        5.0,
        alias="max_wait_time",
        description="Time in which the model waits for memory that becomes free by itself, before it displaces others "
        "that are busy.",
    )
    popular: bool = Field(False, description="No other model may displace this one.")


class SleepSettings(BaseModel):
    """The section `sleep:` of a model."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    idle_timeout_s: Seconds = Field(
        0.0, alias="idle_timeout", description="The model goes to sleep after this long without requests; 0: never."
    )
    drain_timeout_s: Seconds = Field(
        30.0, alias="drain_timeout", description="Running requests of a displaced model have this long to end."
    )
