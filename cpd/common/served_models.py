"""The models of a cluster that serves several: the section `models:` of the YAML file.

What an entry leaves out is as in the cluster's own settings.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from cpd.common.residency_settings import Fairness, SleepSettings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
"""Names begin those of processes."""


class ServedModel(BaseModel):
    """A model and its workers.

    Attributes:
        name: Name in the API, and the beginning of its workers' names.
        aliases: Other names in the API.
        model: Checkpoint directory or Hugging Face id.
        dtype, quantization, kv_dtype, max_model_len, kv_memory, fairness, sleep: As the settings of that name; None:
            as those say.
        prefill: Number of prefill workers.
        combined: Number of combined workers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    aliases: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    model: Annotated[str, Field(min_length=1)]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quantization: Literal["none", "int8", "int4"] | None = None
    kv_dtype: Literal["auto", "int8"] | None = None
    max_model_len: Annotated[int, Field(ge=0)] | None = None
    kv_memory: ByteSize | None = None
    fairness: Fairness | None = None
    sleep: SleepSettings | None = None
    prefill: Annotated[int, Field(ge=0)] = 0
    combined: Annotated[int, Field(ge=1)] = 1

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise PydanticCustomError(
                "name", "at most 48 letters, digits, dots, dashes and underscores; any other name can be an alias"
            )
        return name

    @property
    def names(self) -> list[str]:
        """All its names in the API."""
        return [self.name, *self.aliases]


def repeated_name(models: Sequence[ServedModel]) -> str:
    """Returns a name or alias that is there twice; empty if there is none."""
    counts = Counter(name for one in models for name in one.names)
    return next((name for name, count in counts.items() if count > 1), "")
