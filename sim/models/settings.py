"""Settings of `cpd sim models`. Environment variables start with `CPD_SIM_MODELS_`."""

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import SettingsConfigDict

from cpd.common.settings import Settings


class ModelsSettings(Settings):
    """Settings of simulations of many models on few devices."""

    model_config = SettingsConfigDict(env_prefix="CPD_SIM_MODELS_")

    policies: str = Field(
        "rule,predicted,lru-swap,static", description="Policies, separated by commas: who is awake is up to them."
    )
    seeds: str = Field("0,1,2", description="Seeds of the workload, separated by commas.")
    devices: int = Field(2, ge=1, description="Number of devices.")
    device_memory: ByteSize = Field(ByteSize(118 << 30), description="Memory of each device for models.")
    models: int = Field(
        12, ge=1, description="Number of models, with 8, 16 or 28 GiB of weights; awake they take 16, 32 or 48 GiB."
    )
    models_file: Path | None = Field(
        None,
        description="YAML file with a list of models instead: name, memory, weights, share, fairness, sleep, as in "
        "docs/simulator.md.",
    )
    zipf: float = Field(
        1.0,
        ge=0,
        le=10,
        description="Popularity: the n-th model has a share of the requests proportional to 1 / n^zipf.",
    )
    rate: float = Field(8.0, gt=0, description="Requests a second to all models, averaged over the day.")
    day_s: float = Field(14_400.0, gt=0, description="Seconds that a day takes; the simulation lasts one day.")
    swing: float = Field(
        0.6,
        ge=0,
        le=1,
        description="How much a model's rate varies over the day, relative; each has its own peak hour.",
    )
    burst: float = Field(4.0, ge=1, description="Rate of a model in a burst, as a multiple of its rate otherwise.")
    burst_s: float = Field(60.0, gt=0, description="Mean length of a burst, in seconds.")
    quiet_s: float = Field(600.0, gt=0, description="Mean time between two bursts of a model, in seconds.")
    prompt: str = Field(
        "lognormal:600,0.8", description="Prompt lengths: a number, uniform:low,high or lognormal:median,sigma."
    )
    output: str = Field("lognormal:250,0.6", description="Output lengths, in the same form.")
    profile: str = Field(
        "h200-qwen3-8b", description="Profile that gives step times: a file, or the name of a bundled one."
    )
    profile_weights: ByteSize = Field(
        ByteSize(16 << 30),
        description="Weights of the profile's model. A model with twice the weights takes twice as long a step.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Most sequences in a model's running batch.")
    load_gb_s: float = Field(
        23.0, gt=0, description="Speed of loading weights from pageable host memory, in gigabytes a second."
    )
    staged_gb_s: float = Field(50.0, gt=0, description="Speed of loading staged (page-locked) weights.")
    stage_gb_s: float = Field(10.0, gt=0, description="Speed of staging, on the host, one model a device at a time.")
    wake_fixed_s: float = Field(
        0.5, ge=0, description="Part of a wake that does not depend on the weights: mapping memory, verifying."
    )
    sleep_s: float = Field(0.2, ge=0, description="Time to free a model's memory; weights remain in host memory.")
    parked_kv: Literal["copy", "drop"] = Field(
        "copy",
        description="KV pages of parked requests: copied to host memory and back at --load-gb-s, or dropped and "
        "computed again.",
    )
    slo_ttft: float = Field(10_000.0, gt=0, description="Target time to first token, in ms.")
    slo_itl: float = Field(
        100.0, gt=0, description="Target time between the tokens of a request, on average, in ms; pauses included."
    )
    processes: int = Field(1, ge=1, description="Simulations that run at the same time.")
    json_file: Path | None = Field(
        None, description="Write the results to this JSON file.", json_schema_extra={"flag": "--json"}
    )
