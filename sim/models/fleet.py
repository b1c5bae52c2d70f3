"""The simulated models, and which device each is on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from cpd.common.blocks import BLOCK_SIZE
from cpd.common.errors import ConfigError
from cpd.performance.model import Profile
from cpd.residency.snapshot import Fairness, Model, SleepSettings
from sim.models.settings import ModelsSettings

_WEIGHTS_GIB = 16, 8, 28
_MEMORY_GIB = 32, 16, 48


class ModelSettings(BaseModel):
    """A model in `--models-file`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    memory: Annotated[ByteSize, Field(gt=0)] = Field(description="Device memory that it takes while it is awake.")
    weights: Annotated[ByteSize, Field(gt=0)] | None = Field(None, description="Loaded by a wake; default: half of it.")
    share: float | None = Field(None, gt=0, description="Requests, relative to others'; default: by Zipf's law.")
    fairness: Fairness = Fairness()
    sleep: SleepSettings = SleepSettings()


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model of the simulation.

    Attributes:
        spec: What policies know of it.
        weights_bytes: What a wake loads.
        kv_token_bytes: KV cache of a token.
        share: Share of all requests.
        device: Number of its device.
    """

    spec: Model
    weights_bytes: int
    kv_token_bytes: float
    share: float
    device: int

    @property
    def kv_bytes(self) -> int:
        """Memory for KV pages."""
        return self.spec.memory_bytes - self.weights_bytes


def make_fleet(settings: ModelsSettings) -> list[SimulatedModel]:
    """Returns the models, the most popular one first.

    Each goes to the device that has, so far, the lowest sum of its shares of all requests and of all memory.

    Raises:
        ConfigError: The file cannot be read, or its models are malformed, have one name or do not fit on a device.
    """
    models = _read(settings.models_file) if settings.models_file else _default(settings.models)
    names = [one.name for one in models]
    for one in models:
        if names.count(one.name) > 1:
            raise ConfigError(f"two models have the name {one.name!r}")
        if one.memory > settings.device_memory:
            raise ConfigError(
                f"{one.name} can never be awake: it takes {one.memory.human_readable()}, and a device has "
                f"{settings.device_memory.human_readable()}"
            )
        if one.weights and one.weights > one.memory:
            raise ConfigError(f"{one.name} has more weights than memory")
    zipf = [(number + 1) ** -settings.zipf for number in range(len(models))]
    shares = [one.share or share for one, share in zip(models, zipf, strict=True)]
    token_bytes = Profile.load(settings.profile).page_bytes / BLOCK_SIZE
    loads = [0.0] * settings.devices
    fleet = []
    for share, one in sorted(zip(shares, models, strict=True), key=lambda pair: -pair[0]):
        device = loads.index(min(loads))
        loads[device] += share / sum(shares) + one.memory / sum(model.memory for model in models)
        weights = one.weights or one.memory // 2
        kv_s = (one.memory - weights) / (settings.load_gb_s * 1e9) if settings.parked_kv == "copy" else 0.0
        spec = Model(
            one.name,
            one.memory,
            one.fairness,
            one.sleep,
            wake_s=settings.wake_fixed_s + weights / (settings.load_gb_s * 1e9) + kv_s,
            sleep_s=settings.sleep_s + kv_s,
        )
        scale = weights / settings.profile_weights
        fleet.append(SimulatedModel(spec, weights, scale * token_bytes, share / sum(shares), device))
    return fleet


def _default(count: int) -> list[ModelSettings]:
    """Returns models whose sizes do not depend on how popular they are."""
    models = []
    for number in range(count):
        size = (number + number // 6) % 3
        memory, weights = ByteSize(_MEMORY_GIB[size] << 30), ByteSize(_WEIGHTS_GIB[size] << 30)
        models.append(ModelSettings(name=f"model-{number + 1}", memory=memory, weights=weights))
    return models


def _read(path: Path) -> Sequence[ModelSettings]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the models of {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    try:
        models = TypeAdapter(list[ModelSettings]).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path} is not a list of models: {place and place + ': '}{first['msg']}") from None
    if not models:
        raise ConfigError(f"{path} has no models")
    return models
