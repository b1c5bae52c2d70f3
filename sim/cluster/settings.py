"""The settings of `cpd sim`. Environment variables start with `CPD_SIM_`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from cpd.common.config import Settings
from sim.cluster.policies import PolicyName


class ClusterShape(Settings):
    """What is simulated."""

    model_config = SettingsConfigDict(env_prefix="CPD_SIM_")

    profile: Path = Field(
        Path("profiles/h200-qwen3-8b.json"), description="How long the workers' steps take, and what they predict with."
    )
    workers: int = Field(16, ge=1, description="Workers of both roles together, one device each.")
    prefill_workers: int = Field(
        4, ge=0, description="Of them, prefill workers, in policies that have some; the others are combined."
    )
    num_pages: int = Field(0, ge=0, description="KV pages of each worker; 0 takes the profile's.")
    max_model_len: int = Field(40_960, ge=32, description="Longest prompt plus output, in tokens.")
    max_num_seqs: int = Field(256, ge=1, description="Most sequences in a worker's running batch.")
    token_budget: int = Field(
        0,
        ge=0,
        description="Most tokens of a step on the whole device; 0 takes as many as keep it within --slo-itl while "
        "there are decodes, and what prefills at nearly full speed otherwise.",
    )
    max_queue_tokens: int = Field(
        262_144, ge=1, description="Most prompt tokens that wait in a worker's queue before it refuses more."
    )
    network_ms: float = Field(0.5, ge=0, description="One way between router and worker, and between two workers.")
    slo_ttft: float = Field(2000.0, gt=0, description="Target for the time to the first token, in ms.")
    slo_itl: float = Field(50.0, gt=0, description="Target for the gap between two tokens of a stream, in ms.")
    long_prefill_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto", description="More uncached tokens go to a prefill worker; auto: where it is predicted to be better."
    )
    workload: Literal["mix", "trace"] = Field(
        "mix", description="Chats, agents and long prompts, or the requests of a file."
    )
    file: Path | None = Field(None, description="trace: JSON Lines in Mooncake's form.")
    speedup: float = Field(1.0, gt=0, description="trace: its time runs this many times faster.")
    long_share: float = Field(0.1, ge=0, le=1, description="mix: part of the requests that are long, uncached prompts.")
    agent_share: float = Field(0.5, ge=0, le=1, description="mix: part of the other sessions that are agents'.")
    warmup: float = Field(30.0, ge=0, description="Seconds at the start whose requests are not measured.")
    duration: float = Field(90.0, gt=0, description="Seconds after that in which measured requests come.")
    seed: int = Field(0, ge=0, description="Of the workload, and of what is decided at random.")
    html_file: Path | None = Field(
        None, description="Write a report here, one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class SimSettings(ClusterShape):
    """One run."""

    policy: PolicyName = Field("cpd", description="Where requests go; docs/simulator.md says what each one does.")
    rate: float = Field(50.0, gt=0, description="mix: requests a second, on average.")
    json_file: Path | None = Field(
        None,
        description="Write the result here, as `cpd bench compare` reads it.",
        json_schema_extra={"flag": "--json"},
    )


class CompareSettings(ClusterShape):
    """The highest rate that each policy sustains."""

    policies: str = Field("cpd,aggregated,static-pd,cache-aware", description="Which, the one to compare with first.")
    long_shares: str = Field("", description="mix: several values of --long-share, separated by commas.")
    good_share: float = Field(
        0.95, gt=0, le=1, description="A rate is sustained while so many of the requests meet both targets."
    )
    rate_from: float = Field(10.0, gt=0, description="Lowest rate that is tried, in requests a second.")
    precision: float = Field(0.05, gt=0, description="Rates are told apart to this part of themselves.")
    processes: int = Field(1, ge=1, description="Simulations at a time.")
    json_file: Path | None = Field(
        None, description="Write the table here as JSON.", json_schema_extra={"flag": "--json"}
    )
