"""The settings of every process, each declared once.

A setting is a field with a type, a default and a description; `cpd/common/options.py` turns it into a command-line
flag. The flag wins over the environment (`CPD_TOKEN_BUDGET`), that over the YAML file, that over the default.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ByteSize, Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, from_json
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from cpd.common.errors import ConfigError
from cpd.common.lifecycle import MAX_DRAIN_S
from cpd.common.logs import LogFormat
from cpd.common.policy_settings import PolicySettings
from cpd.common.residency_settings import Fairness, SleepSettings
from cpd.common.served_models import ServedModel, repeated_name

Role = Literal["prefill", "combined"]

SamplingDefaults = Literal["model", "openai"]

ToolCallParserName = Literal["auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "json"]

ReasoningParserName = Literal["auto", "none", "think", "mistral"]

_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]|\*")
"""A host as in a URL, or `*`."""

_ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?|\*")
"""What a browser sends as `Origin`, or `*`."""

MOST_SLO_MS = 1e9
"""Longest latency target, in ms (eleven days)."""

OF_MODEL = (
    "model",
    "dtype",
    "quantization",
    "kv_dtype",
    "max_model_len",
    "kv_memory",
    "prefill",
    "combined",
    "fairness",
    "sleep",
)
"""Settings that an entry of `models` may have."""

SHARED_DEVICE = ("staging_memory", "residency", "fairness", "sleep")
"""Settings that have no effect without `device_memory`."""

NO_SHARED_GPU = "--device-memory is for machines without GPUs so far: pass --device cpu, or leave it out"

MAX_STORED_S = 30 * 86_400.0
"""Longest time for which responses are kept, in seconds (a month)."""


class Settings(BaseSettings):
    """Base of all settings."""

    model_config = SettingsConfigDict(env_prefix="CPD_", extra="forbid", frozen=True)
    _source: tuple[dict[str, Any], Path | None] = PrivateAttr(default_factory=lambda: ({}, None))

    def reload(self) -> Self:
        """Returns the settings that the same flags, the environment and the YAML file give now.

        Raises:
            ConfigError: As `load`.
        """
        return self.load(*self._source)

    @classmethod
    def load(cls, flags: dict[str, Any], config: Path | None = None) -> Self:
        """Merges flags, environment and the YAML file `config`.

        Raises:
            ConfigError: A setting is unknown or out of range; the message names it.
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
                values = (_with_sections(cls, source) for source in (env_settings(), from_file))
                return init_settings, *(InitSettingsSource(settings_cls, value) for value in values)

        try:
            merged = Loaded(**_with_sections(cls, flags))
        except ValidationError as error:
            raise ConfigError(_sentence(error, cls)) from None
        # Instances of a local class cannot be pickled.
        loaded = cast(Self, cls.model_construct(**{name: getattr(merged, name) for name in cls.model_fields}))
        loaded._source = (flags, config and config.absolute())
        return loaded


class ModelSettings(Settings):
    """A model and the device that runs it."""

    model: str = Field("", description="Checkpoint directory (config.json, safetensors), GGUF file or Hugging Face id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of activations, weights and KV cache; auto takes the checkpoint's."
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="Bits of linear layers' weights: as in the checkpoint, or 8 or 4 bits in groups of 32, quantised "
        "at start. On CPUs only.",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="Type of KV pages: that of activations, or 8 bits with a scale for each token and head, on CPUs.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where to run; auto takes GPUs if there are any."
    )
    max_model_len: int = Field(
        0, ge=0, description="Longest prompt plus output, in tokens; 0 takes the checkpoint's limit."
    )
    kv_memory: ByteSize | None = Field(
        None,
        description="KV page pool of each worker, such as 2GiB. Default: 1GiB; on a GPU, what weights leave of "
        "--gpu-memory; simulated, as much as the profile's device has.",
    )
    gpu_memory: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory for weights, KV pages and intermediate results, split among the workers "
        "on it.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Most sequences in a worker's running batch.")


class TargetSettings(Settings):
    """The target that workers and routers plan by."""

    slo_itl: float = Field(
        50.0,
        ge=0,
        le=MOST_SLO_MS,
        description="Target gap between two tokens of a stream, in ms; 0: no target.",
    )

    max_wait_s: float = Field(
        60.0,
        gt=0,
        description="Longest wait of a request before its prompt is computed, in seconds. If more is predicted, it is "
        "refused; once it has waited longer, it is given up: 503 with Retry-After.",
    )


def _plain(host: str) -> str:
    """Returns a host as sockets name it: an IPv6 address without brackets and in its shortest form, `::0` as `::`."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        return str(ip_address(host))
    except ValueError:
        return host


class EngineSettings(TargetSettings, ModelSettings):
    """Settings of a worker's engine."""

    token_budget: int = Field(
        0,
        ge=0,
        description="Most tokens of a batch on the whole device; 0: as many as keep a step within --slo-itl beside "
        "decodes, and otherwise as many as prefill at nearly full speed.",
    )
    colocate: Literal["auto", "mixed", "lanes"] = Field(
        "auto",
        description="Where prompts are computed beside decodes: in their batch (mixed), on a prefill lane (lanes), or "
        "where it is predicted to be better (auto).",
    )
    profile: str = Field(
        "",
        description="Profile of this model and device, written by `cpd profile`: a file or the name of a bundled one. "
        "Without it a worker times a few steps at start.",
    )
    max_queue_tokens: int = Field(
        262_144, ge=1, description="Most prompt tokens that wait in a worker's queue; it refuses more."
    )
    host_kv_memory: ByteSize = Field(
        ByteSize(0),
        description="Host memory of each worker for KV pages that its pool evicts, such as 8GiB; 0: none. Pages are "
        "loaded back where that is predicted to be quicker than computing them again.",
    )


class SharedSettings(Settings):
    """Settings of every process of a cluster."""

    cluster: str = Field("default", description="Name of the cluster; several can share one Redis.")
    redis_url: str = Field("", description="URL of your own Redis; empty starts an embedded one.")
    secret_file: Path | None = Field(
        None,
        description="File with the cluster's secret, a long random text that its processes prove to each other; the "
        "same on every machine. Default: `cpd up` makes one for its own machine.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log shown.")
    log_format: LogFormat = Field("text", description="Log lines as text, or as JSON for a log store.")


class MemberSettings(SharedSettings):
    """Settings of every router and worker."""

    host: str = Field("127.0.0.1", description="Interface to listen on.")
    lease_s: float = Field(
        5.0, gt=0, description="A process that does not renew its lease in Redis for this long is gone, in seconds."
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=MAX_DRAIN_S,
        description="Time that running requests have to end by themselves when a worker or router gets SIGTERM or "
        "`cpd drain`, in seconds. Then a worker's requests move to another worker, and a router's fail.",
    )

    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Collector that gets traces of requests by OTLP over HTTP, such as http://localhost:4318.",
    )

    _plain_host = field_validator("host")(_plain)


class SharedDeviceSettings(Settings):
    """Models that share a device's memory, and who is awake."""

    device_memory: Annotated[ByteSize, Field(gt=0)] | None = Field(
        None,
        description="Memory of each machine for models that share it, such as 64GiB: those that do not fit at the same "
        "time sleep and wake by turns. Default: no model sleeps, and all must fit.",
    )
    staging_memory: ByteSize = Field(
        ByteSize(0),
        description="Memory of each machine for copies of weights of models that sleep, from which they wake faster "
        "than from disk; the least recently used are dropped.",
    )
    residency: Literal["rule", "predicted"] = Field(
        "rule",
        description="How it is decided which models are awake: in turn, by times that are set for each (rule), or by "
        "predicted costs within the same bounds (predicted).",
    )
    fairness: Annotated[Fairness, NoDecode] = Field(
        Fairness(),
        description="When models displace each other: min_runtime, max_wait_time and popular, in the section "
        "`fairness:` of the YAML file, also of an entry of `models:`.",
    )
    sleep: Annotated[SleepSettings, NoDecode] = Field(
        SleepSettings(),
        description="When models sleep: idle_timeout and drain_timeout, in the section `sleep:` of the YAML file, also "
        "of an entry of `models:`.",
    )


class AllWorkersSettings(MemberSettings, EngineSettings, SharedDeviceSettings):
    """Settings that all workers of a cluster share."""

    transport: Literal["auto", "nixl", "ucx"] = Field(
        "auto",
        description="How KV pages move between workers: nixl writes into memory on one machine, and goes by RDMA or "
        "TCP between machines; ucx writes over TCP. auto: nixl if it works, else ucx.",
    )
    kv_checksum: bool = Field(
        False,
        description="Check the checksum of every page that arrives from another worker or from host memory.",
    )
    prefill_progress_s: float = Field(
        10.0,
        gt=0,
        description="A remote prefill fails after this long without progress, in seconds; a prefix fetch after this "
        "long in all.",
    )


class WorkersSettings(AllWorkersSettings):
    """Settings of a cluster's workers."""

    prefill: int = Field(1, ge=0, description="Number of prefill workers.")
    combined: int = Field(1, ge=1, description="Number of combined workers (prefill and decode).")
    simulate: str = Field(
        "",
        description="Simulate the workers: steps and transfers take as long as this profile says, a file or the name "
        "of a bundled one such as h200-qwen3-8b; with `instant` they take no time.",
    )


class _Advertised(Settings):
    advertise_host: str = Field("", description="Address at which other processes reach this one; empty takes --host.")

    _plain_advertise_host = field_validator("advertise_host")(_plain)


class WorkerSettings(AllWorkersSettings, _Advertised):
    """One worker process."""

    worker_id: str = Field("", description="Name of this worker; empty: a random one.")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    session_port: int = Field(0, ge=0, le=65535, description="Port for sessions and prefills; 0 takes a free one.")
    served_model_name: str = Field(
        "", description="Name in `models:` of the model that this worker serves; empty in a cluster with one model."
    )


class SimulatedSettings(WorkersSettings, _Advertised):
    """One process that simulates all workers of a cluster."""


class AllRoutersSettings(MemberSettings, TargetSettings):
    """Settings that all routers of a cluster share."""

    model: str = Field("", description="Checkpoint directory: tokenizer.json, tokenizer_config.json, config.json.")
    served_model_name: str = Field("", description="Model name in the API; empty: the directory's name or the id.")
    models: Annotated[list[ServedModel], NoDecode] = Field(
        default_factory=list,
        description="Several models instead of --model, each with its own workers: the section `models:` of the YAML "
        "file, or the same as JSON.",
    )
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    api_key: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Key that clients must send; it allows everything. Repeat for several tenants. None: open to all.",
    )
    api_key_file: Path | None = Field(
        None,
        description="YAML file with a list of more keys: key, name, admin, min_priority, max_requests, "
        "max_tokens_per_minute, max_body_memory, models. It is read again when it changes.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the HTTP endpoint's certificate, and those that lead to its authority. It is "
        "read again when it changes. Default: no TLS.",
    )
    tls_key: Path | None = Field(None, description="PEM file with the key of --tls-cert.")
    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Host names that clients may use in the server's URL, besides localhost, 127.0.0.1, [::1] and "
        "--host: without port, separated by commas; * allows any. A request for another host is refused, so that no "
        "web page can reach the server under a name of its own (DNS rebinding). Default: any; on a loopback --host "
        "without API keys, no others.",
    )
    allowed_origins: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Sites whose web pages may use the API in a browser (CORS), such as https://app.example, separated "
        "by commas; * allows any. Default: none.",
    )
    store_responses: float = Field(
        0.0,
        ge=0,
        le=MAX_STORED_S,
        description="Keep the responses of the Responses API in Redis for this many seconds, so that clients can "
        "continue them (previous_response_id); 0: not at all.",
    )
    max_connections_per_client: int = Field(
        1024,
        ge=0,
        description="Most connections from one address (IPv6: one /64 network) to a router; 0: no limit. A further one "
        "gets a 429.",
    )
    trusted_proxies: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Addresses or networks of reverse proxies, such as 10.0.0.0/8, separated by commas. They may "
        "have any number of connections; each request over them counts for the client in X-Forwarded-For.",
    )
    slo_ttft: float = Field(2000.0, gt=0, le=MOST_SLO_MS, description="Target time to first token, in ms.")
    long_prefill_tokens: Annotated[int, Field(ge=0, le=1 << 30)] | Literal["auto"] = Field(
        "auto",
        description="Prompts with more uncached tokens go to a prefill worker; auto: wherever the predicted cost is "
        "lowest.",
    )
    policy: Annotated[PolicySettings, NoDecode] = Field(
        PolicySettings(),
        description="Placement policy: cost, most-cached, round-robin or module:object. Its constants are set in the "
        "section `policy:` of the YAML file.",
    )
    sampling_defaults: SamplingDefaults = Field(
        "model",
        description="Sampling parameters that a request leaves out: from generation_config.json (model), or OpenAI's "
        "defaults: temperature 1, no filters (openai).",
    )
    tool_call_parser: ToolCallParserName = Field(
        "auto",
        description="How the model writes tool calls: hermes (also Qwen 2.5 and 3), llama3_json, pythonic, mistral, "
        "json, or none; auto: as its chat template shows.",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="How the model marks its reasoning, which is returned apart: think (<think>), mistral ([THINK]), "
        "or none; auto: as its chat template shows.",
    )
    max_n: int = Field(16, ge=1, description="Most choices (n) of one request.")
    tenant_requests: int = Field(
        0,
        ge=0,
        description="Most requests of a tenant in progress; 0: no limit. This and the next two hold where the key file "
        "says nothing else, and without keys for all clients together.",
    )
    tenant_tokens_per_minute: int = Field(
        0, ge=0, description="Most tokens a minute of a tenant, of prompts and outputs; 0: no limit."
    )
    tenant_body_memory: ByteSize = Field(
        ByteSize(256 << 20),
        description="Most bytes of a tenant's request bodies that a router reads or processes at a time; 0: no limit.",
    )
    max_body: ByteSize = Field(ByteSize(8 << 20), description="Largest request body.")
    otlp_sampling: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the requests that are traced, with --otlp-endpoint; a request with a `traceparent` is if "
        "that says so.",
    )

    def check_models(self) -> None:
        """Raises ConfigError if the settings for one model and those for several are mixed."""
        for name in ("model", "served_model_name"):
            if self.models and getattr(self, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is for one model: leave it out, or name all models in `models:`")

    @field_validator("api_key", "allowed_hosts", "allowed_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return value
        return [part.strip() for text in texts for part in text.split(",") if part.strip()]

    @field_validator("api_key", mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and any(
            isinstance(text, str) and not text.replace(",", " ").strip() for text in texts
        ):
            raise PydanticCustomError(
                "empty",
                "a key is empty, perhaps from an unset variable: give it, or leave the setting out to be open to all",
            )
        return value

    @field_validator("models")
    @classmethod
    def _check_names(cls, models: list[ServedModel]) -> list[ServedModel]:
        if name := repeated_name(models):
            raise PydanticCustomError(
                "names", "two models have the name or alias {name}: give each its own", {"name": repr(name)}
            )
        return models

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, names: list[str]) -> list[str]:
        for name in names:
            try:
                ip_network(name, strict=False)
            except ValueError:
                raise PydanticCustomError("network", "not an IP address or network such as 10.0.0.0/8") from None
        return names

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise PydanticCustomError("host", "not a host name or address without scheme and port, or *")
        return hosts

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise PydanticCustomError(
                    "origin", "not a scheme and host such as https://app.example, without path, or *"
                )
        return origins


class RouterSettings(AllRoutersSettings, _Advertised):
    """One router process."""

    router_id: str = Field("", description="Name of this router; empty: a random one.")
    admin_port: int = Field(
        0, ge=0, le=65535, description="Port for /metrics, /cluster and /requests of this router; 0 takes a free one."
    )


class PlannerSettings(SharedSettings):
    """One planner process."""

    planner: Literal["advise", "act"] = Field(
        "advise", description="Say how many workers should prefill (advise), or change their roles, too (act)."
    )


class ClusterSettings(AllRoutersSettings, WorkersSettings):
    """Settings of a whole cluster, for `cpd up`."""

    planner: Literal["off", "advise", "act"] = Field(
        "off",
        description="Decide how many workers prefill, by what arrives: say it (advise), or change their roles, too "
        "(act).",
    )
    min_workers: int = Field(1, ge=1, description="Fewest workers that the planner leaves, with --max-workers.")
    max_workers: int = Field(
        0, ge=0, description="Most workers that the planner starts; 0: it does not change the number of workers."
    )

    model: str = Field(
        "", description="Checkpoint directory, GGUF file or Hugging Face id; empty serves the bundled tiny model."
    )
    routers: int = Field(1, ge=1, description="Router processes on the one port.")
    ray_address: str = Field("", description="Ray cluster to join, host:port or auto; empty starts a local one.")
    detach: bool = Field(
        False, description="Return when the cluster is ready; it goes on in the background until `cpd down`."
    )

    @field_validator("planner", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of `off`

    def check_models(self) -> None:
        """Raises ConfigError if a setting does not work with `models` or with `device_memory`."""
        super().check_models()
        self._check_shared_device()
        if not self.models:
            return
        for name in ("combined", "prefill"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(f"--{name} is for one model: give each entry of `models:` its own `{name}`")
        if self.planner != "off":
            raise ConfigError("--planner works for one model only: leave it out, or leave `models:` out")
        for name in ("simulate", "profile"):
            if getattr(self, name):
                raise ConfigError(f"--{name} is the profile of one model: leave it out, or leave `models:` out")

    def _check_shared_device(self) -> None:
        """Raises ConfigError if a setting does not work with `device_memory`, or needs it."""
        if self.device_memory is None:
            own = type(self).model_fields
            needing = [name for name in SHARED_DEVICE if getattr(self, name) != own[name].default]
            needing += ["fairness of models" for one in self.models if one.fairness]
            needing += ["sleep of models" for one in self.models if one.sleep]
            if needing:
                raise ConfigError(
                    f"{needing[0].replace('_', '-')} is for models that share a device, and needs --device-memory: "
                    "without it no model sleeps"
                )
            return
        if self.device == "cuda":
            raise ConfigError(NO_SHARED_GPU)
        for name, default in (("simulate", ""), ("planner", "off")):
            if getattr(self, name) != default:
                raise ConfigError(f"--{name} does not work with --device-memory: leave one of them out")
        for one in self.each_model():
            if one.prefill:
                where = f"`prefill` of {one.served_model_name} in `models:`" if self.models else "--prefill"
                raise ConfigError(
                    f"{where} is {one.prefill}, and must be 0 with --device-memory: workers of both roles would take "
                    "the model's memory twice"
                )

    def each_model(self) -> "list[ClusterSettings]":
        """Returns the settings of each model's workers: these themselves if there is one model."""
        return [self.of_model(one.name) for one in self.models] or [self]

    def of_model(self, name: str) -> "ClusterSettings":
        """Returns the settings of the workers of a model in `models`, as if it were the only one; these themselves for
        an empty name."""
        if not name:
            return self
        (one,) = (one for one in self.models if one.name == name)
        own = {setting: getattr(one, setting) for setting in OF_MODEL}
        given = {setting: value for setting, value in own.items() if value is not None}
        return self.model_copy(update={"models": [], "served_model_name": name, **given})


def _with_sections(settings: type[Settings], values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with a mapping for each setting that is a section of its own.

    A text is JSON, or the section's `name`. So a flag that names a policy keeps the constants of the YAML file. A list
    of sections is JSON only.

    Raises:
        ConfigError: The JSON is invalid.
    """
    values = dict(values)
    for name in values.keys() & settings.model_fields.keys():
        if section_of(settings, name) is None:
            continue
        value, several = values[name], get_origin(settings.model_fields[name].annotation) is list
        if isinstance(value, str):
            try:
                value = from_json(value) if several or value.startswith("{") else {"name": value}
            except ValueError as error:
                raise ConfigError(f"{name.replace('_', '-')} is not valid JSON: {error}") from None
        values[name] = [_underscored(one) for one in value] if isinstance(value, list) else _underscored(value)
    return values


def _underscored(value: Any) -> Any:
    """Returns a mapping with underscores for dashes in its keys, and in those within it; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {str(key).replace("-", "_"): _underscored(one) for key, one in value.items()}


def section_of(settings: type[Settings], name: str) -> type[BaseModel] | None:
    """Returns the class of a setting that is a section of its own, or a list of sections, else None."""
    return _section(settings.model_fields, name)


def _section(fields: Mapping[str, FieldInfo], name: str) -> type[BaseModel] | None:
    kind: Any = fields[name].annotation if name in fields else None
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is UnionType:
        kind = next(one for one in get_args(kind) if one is not NoneType)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _sentence(error: ValidationError, settings: type[Settings]) -> str:
    """One sentence about a setting that does not exist, else about the first one that is wrong."""
    errors = error.errors()
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place, given = first["loc"], first["input"]
    fields, parts, left = settings.model_fields, list[str](), list(place)
    while left:
        parts.append(str(left.pop(0)))
        section = _section(fields, parts[-1])
        if section is not None and left and isinstance(left[0], int):
            parts.append(str(left.pop(0)))
        if section is None or not left:
            break
        fields = section.model_fields
    name = ".".join(parts).replace("_", "-") or "settings"
    if first["type"] == "extra_forbidden":
        names = [field.alias or key for key, field in fields.items()]
        known = [".".join([*parts[:-1], one]).replace("_", "-") for one in names]
        near = get_close_matches(name, known, 1)
        return f"there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    reasons = dict.fromkeys(one["msg"] for one in errors if one["loc"][: len(parts)] == place[: len(parts)])
    told = f"{name}: {', or: '.join(reasons)}"
    return told if first["type"] in ("missing", "names", "empty") else f"{told} (got {given!r})"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not UTF-8 in line {line}: save it in this encoding") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"{path} must hold one mapping of setting names to values")
    return {str(name).replace("-", "_"): value for name, value in (data or {}).items()}
