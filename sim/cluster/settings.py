"""Settings of `cpd sim`. Environment variables start with `CPD_SIM_`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import NoDecode, SettingsConfigDict

from cpd.common.policy_settings import PolicySettings
from cpd.common.settings import Settings

MAX_PROFILE_ERROR = 0.95


class ClusterShape(Settings):
    """Settings of a simulated cluster."""

    model_config = SettingsConfigDict(env_prefix="CPD_SIM_")

    profile: str = Field(
        "h200-qwen3-8b",
        description="Profile that gives step times: a file, or the name of a bundled one.",
    )
    predict_profile: str = Field(
        "", description="Profile by which workers and router predict; empty: that of --profile."
    )
    profile_error: float = Field(
        0.0,
        ge=0,
        le=MAX_PROFILE_ERROR,
        description="Makes each worker's predictions wrong: decodes, prefills, attention and transfers each by a "
        "factor of their own, for 0.2 from 0.8 to 1.2.",
    )
    step_noise: float = Field(
        0.0, ge=0, le=1, description="Standard deviation of step times around the profile, relative; 0.05 is 5 %."
    )
    drift: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Standard deviation of a worker's speed, which changes over half a minute; relative.",
    )
    max_tokens: int = Field(
        4096,
        ge=0,
        description="Output limit of requests with shorter answers, whose true lengths the router can't see.",
    )
    workers: int = Field(16, ge=1, description="Number of workers, with one device each.")
    prefill_workers: int = Field(
        4, ge=0, description="Prefill workers among them, in policies that have some; the others are combined."
    )
    planner: Literal["off", "act"] = Field(
        "off", description="act: a planner changes the workers' roles as the load changes, in policies that have both."
    )
    num_pages: int = Field(0, ge=0, description="KV pages of each worker; 0: as many as the profile says.")
    max_model_len: int = Field(40_960, ge=32, description="Longest prompt plus output, in tokens.")
    max_num_seqs: int = Field(256, ge=1, description="Most sequences in a worker's running batch.")
    token_budget: int = Field(
        0,
        ge=0,
        description="Most tokens of a batch on the whole device; 0: as many as keep a step within --slo-itl beside "
        "decodes, and otherwise as many as prefill at nearly full speed.",
    )
    max_queue_tokens: int = Field(
        262_144, ge=1, description="Most prompt tokens that wait in a worker's queue; it refuses more."
    )
    network_ms: float = Field(0.5, ge=0, description="Delay of a message between two processes, in ms.")
    slo_ttft: float = Field(2000.0, gt=0, description="Target time to first token, in ms.")
    slo_itl: float = Field(50.0, gt=0, description="Target gap between two tokens of a stream, in ms.")
    long_prefill_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Prompts with more uncached tokens go to a prefill worker; auto: wherever the predicted cost is "
        "lowest.",
    )
    policy: Annotated[PolicySettings, NoDecode] = Field(
        PolicySettings(),
        description="A policy of the router, module:object, or another system to compare with (docs/simulator.md). "
        "Constants are set in the section `policy:` of the YAML file.",
    )
    workload: Literal["mix", "day", "trace"] = Field(
        "mix",
        description="mix: chats, agents and long prompts; day: the same as they change over a day; trace: the requests "
        "of --file.",
    )
    day_s: float = Field(480.0, gt=0, description="day: seconds that a day takes.")
    file: Path | None = Field(None, description="trace: a file of JSON lines in Mooncake's format.")
    speedup: float = Field(1.0, gt=0, description="trace: replay it this many times faster.")
    long_share: float = Field(0.1, ge=0, le=1, description="mix: share of requests that are long, uncached prompts.")
    agent_share: float = Field(0.5, ge=0, le=1, description="mix: share of agents among the other sessions.")
    warmup: float = Field(30.0, ge=0, description="Seconds before measuring begins.")
    duration: float = Field(90.0, gt=0, description="Seconds in which measured requests arrive.")
    seed: int = Field(0, ge=0, description="Seed of the workload and of random choices.")
    html_file: Path | None = Field(
        None, description="Write a report to this file, one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class SimSettings(ClusterShape):
    """Settings of one run."""

    rate: float = Field(
        50.0, gt=0, description="mix: requests a second, on average; day: those of chats at their peak."
    )
    json_file: Path | None = Field(
        None,
        description="Write the result to this file, for `cpd bench compare`.",
        json_schema_extra={"flag": "--json"},
    )


class CompareSettings(ClusterShape):
    """Settings of a search for the highest rate of each policy."""

    policies: str = Field(
        "cost,sglang,static-pd,dynamo", description="Policies, separated by commas; ratios are to the first."
    )
    long_shares: str = Field("", description="mix: several values of --long-share, separated by commas.")
    profile_errors: str = Field(
        "0,0.2,0.5", description="Several values of --profile-error, separated by commas; empty: only that one."
    )
    good_share: float = Field(
        0.95, gt=0, le=1, description="Share of requests that must meet both targets for a rate to count as sustained."
    )
    rate_from: float = Field(10.0, gt=0, description="Rate to begin with, in requests a second.")
    precision: float = Field(0.05, gt=0, description="Relative precision of the rates found.")
    processes: int = Field(1, ge=1, description="Simulations that run at the same time.")
    json_file: Path | None = Field(
        None, description="Write the table to this JSON file.", json_schema_extra={"flag": "--json"}
    )
