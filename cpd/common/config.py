"""The settings of every process, each declared once.

A setting is a field with a type, a default and a description; `cpd/common/options.py` makes the command-line flag of
it. Precedence: flag, then environment (`CPD_TOKEN_BUDGET`), then the YAML file, then the default.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from cpd.common.errors import ConfigError

Role = Literal["prefill", "combined"]

SamplingDefaults = Literal["model", "openai"]

MOST_SLO_MS = 1e9
"""No target is longer: eleven days, which is none."""


class Settings(BaseSettings):
    """Base of all settings."""

    model_config = SettingsConfigDict(env_prefix="CPD_", extra="forbid", frozen=True)

    @classmethod
    def load(cls, flags: dict[str, Any], config: Path | None = None) -> Self:
        """Merges flags, environment and the YAML file `config`.

        Raises:
            ConfigError: A value is unknown or out of range; the message names it.
        """
        from_file = _read_yaml(config) if config else {}

        class Loaded(cls):  # type: ignore[misc,valid-type]
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[BaseSettings],
                init_settings: PydanticBaseSettingsSource,
                env_settings: PydanticBaseSettingsSource,
                dotenv_settings: PydanticBaseSettingsSource,
                file_secret_settings: PydanticBaseSettingsSource,
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return init_settings, env_settings, InitSettingsSource(settings_cls, from_file)

        try:
            merged = Loaded(**flags)
        except ValidationError as error:
            raise ConfigError(_sentence(error, cls)) from None
        # An instance of the named class: those of a local one cannot be sent to another process.
        return cast(Self, cls.model_construct(**{name: getattr(merged, name) for name in cls.model_fields}))


class ModelSettings(Settings):
    """A model on a device."""

    model: str = Field("", description="Checkpoint directory (config.json, safetensors) or Hugging Face id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and KV cache; auto takes the checkpoint's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to run; auto takes a GPU if present.")
    max_model_len: int = Field(
        0, ge=0, description="Longest prompt plus output, in tokens; 0 takes the checkpoint's limit."
    )
    kv_memory: ByteSize | None = Field(
        None,
        description="Memory of the KV page pool, such as 2GiB; unless given 1GiB, on a GPU what weights leave of "
        "--gpu-memory, and of simulated workers what their profile's device has.",
    )
    gpu_memory: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Part of a GPU's memory that weights, KV pages and intermediate results take, of all workers that "
        "share it.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Most sequences in the running batch.")


class TargetSettings(Settings):
    """What workers and routers plan by."""

    slo_itl: float = Field(
        50.0,
        ge=0,
        le=MOST_SLO_MS,
        description="The next token of a stream is to come within this time, in ms; 0: no target.",
    )


class EngineSettings(ModelSettings, TargetSettings):
    """What the engine of a worker needs to know."""

    token_budget: int = Field(
        0,
        ge=0,
        description="Most tokens that one batch on the whole device computes; 0 takes as many as keep a step within "
        "--slo-itl while there are decodes, and what prefills at nearly full speed otherwise.",
    )
    colocate: Literal["auto", "mixed", "lanes"] = Field(
        "auto",
        description="Where prompts go while there are decodes: into their batch (mixed), onto a lane beside them "
        "(lanes), or whichever is predicted to be better (auto).",
    )
    profile: Path | None = Field(
        None,
        description="What `cpd profile` wrote for this model and device; without it a few steps are timed at start.",
    )
    max_queue_tokens: int = Field(
        262_144, ge=1, description="Most prompt tokens that wait in a worker's queue before it refuses more."
    )
    host_kv_memory: ByteSize = Field(
        ByteSize(0),
        description="Host memory of each worker for KV pages that its pool evicts, such as 8GiB; 0: none. They come "
        "back where that is predicted to be quicker than computing them again.",
    )


class SharedSettings(Settings):
    """What every process of a cluster is told."""

    cluster: str = Field("default", description="Name of the cluster; several can share one Redis.")
    host: str = Field("127.0.0.1", description="Interface to listen on.")
    redis_url: str = Field("", description="Redis that holds the shared state; empty starts an embedded one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log shown.")


class AllWorkersSettings(EngineSettings, SharedSettings):
    """What all workers of a cluster have in common."""

    cluster_token: SecretStr = Field(SecretStr(""), description="Secret that internal calls must carry.")
    transport: Literal["auto", "nixl", "ucx"] | None = Field(
        None,
        description="How KV pages move between workers; auto: by nixl where it works, else by ucx. Unless given ucx; "
        "pages in a GPU's memory move by nixl only.",
    )
    kv_checksum: bool = Field(
        False,
        description="Check a checksum of every page that comes from another worker, or from host memory, before it is "
        "used.",
    )
    lease_s: float = Field(5.0, gt=0, description="A worker silent in Redis for this long, in seconds, is gone.")
    fill_progress_s: float = Field(
        10.0,
        gt=0,
        description="A remote prefill without progress, or a fetch from another cache, of so many seconds has failed.",
    )


class WorkersSettings(AllWorkersSettings):
    """The workers of a cluster."""

    prefill: int = Field(1, ge=0, description="Prefill workers.")
    combined: int = Field(1, ge=1, description="Combined workers (prefill and decode).")
    simulate: str = Field(
        "",
        description="Simulate the workers, all in one process: steps and transfers take as long as this profile says, "
        "or, with `instant`, no time. Empty: real ones.",
    )


class _Advertised(Settings):
    advertise_host: str = Field("", description="Address other processes reach this one at; empty takes --host.")


class WorkerSettings(AllWorkersSettings, _Advertised):
    """One worker process."""

    worker_id: str = Field("", description="Name of this worker; empty makes one up.")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    session_port: int = Field(0, ge=0, le=65535, description="Port for sessions and fills; 0 takes a free one.")


class SimulatedSettings(WorkersSettings, _Advertised):
    """One process with all workers of a cluster, simulated."""


class AllRoutersSettings(TargetSettings, SharedSettings):
    """What all routers of a cluster have in common."""

    model: str = Field("", description="Checkpoint directory: tokenizer.json, tokenizer_config.json, config.json.")
    served_model_name: str = Field("", description="Name in the API; empty takes the directory's name.")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port.")
    cluster_token: SecretStr = Field(SecretStr(""), description="Secret that internal calls must carry.")
    api_key: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Key that clients must send, for everything; repeat for several tenants. None: open to all.",
    )
    api_key_file: Path | None = Field(
        None,
        description="YAML list of more keys, each with what it allows: key, admin (false), min_priority (0).",
    )
    slo_ttft: float = Field(
        2000.0, gt=0, le=MOST_SLO_MS, description="A first token is to come within this time, in ms."
    )
    long_prefill_tokens: Annotated[int, Field(ge=0, le=1 << 30)] | Literal["auto"] = Field(
        "auto",
        description="A prompt with more uncached tokens than this goes to a prefill worker; auto: where that is "
        "predicted to be better.",
    )
    sampling_defaults: SamplingDefaults = Field(
        "model",
        description="How what a request leaves out is sampled: as the model's generation_config.json says (model), or "
        "by OpenAI's defaults alone (openai).",
    )
    max_n: int = Field(16, ge=1, description="Most choices (n) a request may ask for.")
    max_body: ByteSize = Field(ByteSize(8 << 20), description="Largest request body.")

    @field_validator("api_key", mode="before")
    @classmethod
    def _split_keys(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return value
        return [key for text in texts for key in text.split(",") if key]


class RouterSettings(AllRoutersSettings, _Advertised):
    """One router process."""

    router_id: str = Field("", description="Name of this router; empty makes one up.")
    admin_port: int = Field(
        0, ge=0, le=65535, description="Port for /metrics, /cluster and /requests of this router alone; 0: a free one."
    )


class ClusterSettings(AllRoutersSettings, WorkersSettings):
    """`cpd up`: a whole cluster."""

    model: str = Field("", description="Checkpoint directory or Hugging Face id; empty serves the bundled tiny model.")
    routers: int = Field(1, ge=1, description="Router processes on the one port.")
    ray_address: str = Field("", description="Ray cluster to join; empty starts a local one.")


def _sentence(error: ValidationError, settings: type[Settings]) -> str:
    """What is wrong with the first setting that is."""
    errors = error.errors()
    place, given = errors[0]["loc"], errors[0]["input"]
    name = str(place[0]).replace("_", "-") if place else "settings"
    if errors[0]["type"] == "extra_forbidden":
        known = [field.replace("_", "-") for field in settings.model_fields]
        near = get_close_matches(name, known, 1)
        return f"there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    reasons = dict.fromkeys(one["msg"] for one in errors if one["loc"][:1] == place[:1])
    return f"{name}: {', or: '.join(reasons)} (got {given!r})"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"{path} must hold one mapping of setting names to values")
    return {str(name).replace("-", "_"): value for name, value in (data or {}).items()}
