"""The settings of `cpd bench`. Environment variables start with `CPD_BENCH_`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from cpd.common.settings import Settings


class TargetSettings(Settings):
    """The server, and how to send requests to it."""

    model_config = SettingsConfigDict(env_prefix="CPD_BENCH_")

    url: str = Field("http://127.0.0.1:8000", description="URL of the server, with or without a trailing /v1.")
    model: str = Field("", description="Model name; by default the first model that the server lists.")
    api_key: SecretStr = Field(SecretStr(""), description="API key, sent as a bearer token.")
    endpoint: Literal["chat", "completions"] = Field("chat", description="Endpoint for requests.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    ignore_eos: bool = Field(
        True,
        description="Request exactly --output-len tokens with the ignore_eos field of vLLM, SGLang and cpd.",
    )
    extra_body: str = Field("", description="JSON object with further fields for every request body.")
    timeout_s: float = Field(
        120.0, gt=0, description="A request fails if nothing of its answer comes for this many seconds."
    )
    tokenizer: str = Field(
        "",
        description="Directory with the model's tokenizer.json, for prompts of exact length and counts without usage.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="Seed of all prompts and times. By default every run has new prompts, so that no cache helps.",
    )
    selftest: bool = Field(True, description="First measure the client's own error, for about two seconds.")
    json_file: Path | None = Field(
        None, description="File for the whole result as JSON.", json_schema_extra={"flag": "--json"}
    )
    html_file: Path | None = Field(
        None, description="File for a report, one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class WorkloadSettings(TargetSettings):
    """The prompts and their lengths."""

    workload: Literal["random", "shared-prefix", "multi-turn", "trace", "jsonl"] = Field(
        "random", description="Kind of prompts."
    )
    input_len: str = Field(
        "512",
        description="Prompt tokens: 512, uniform:256,1024, normal:512,64 (mean, deviation) or lognormal:512,0.5.",
    )
    output_len: str = Field("128", description="Output tokens, in the same form.")
    prefix_groups: int = Field(8, ge=1, description="shared-prefix: groups of prompts that share a prefix.")
    hit_rate: float = Field(
        0.5, ge=0, lt=1, description="shared-prefix: share of the prompt tokens that a warm cache holds."
    )
    preset: Literal["", "heavy", "light"] = Field(
        "", description="multi-turn: heavy is 2048 tokens first, 512 later, 256 out; light is 512, 256, 256."
    )
    turns: int = Field(5, ge=1, description="multi-turn: turns in a conversation.")
    later_len: str = Field("256", description="multi-turn: new prompt tokens of each turn after the first.")
    think_s: str = Field(
        "0",
        description="Seconds between an answer and a user's next turn, in the form of --input-len. With --users also "
        "between sessions.",
    )
    file: Path | None = Field(
        None, description="trace: file in Mooncake's JSONL. jsonl: lines with a prompt or messages, or a ShareGPT file."
    )
    speedup: float = Field(1.0, gt=0, description="trace: replay it this many times faster.")


class LoadSettings(WorkloadSettings):
    """The load, and the latency targets."""

    rate: float | None = Field(None, gt=0, description="Open loop: sessions a second, independent of the server.")
    arrival: Literal["poisson", "gamma", "constant"] = Field("poisson", description="Open loop: gaps between sessions.")
    burstiness: float = Field(
        1.0, gt=0, description="gamma: shape; 1 is Poisson, smaller is burstier, larger is steadier."
    )
    num_requests: int | None = Field(
        None, ge=1, description="Sessions to send; by default 200, all of a file, or those within --duration."
    )
    duration: float | None = Field(
        None, gt=0, description="Stop sending after this many seconds; running requests finish."
    )
    slo: str = Field("", description="Latency targets for goodput in ms, such as ttft=2000,itl=50,e2e=10000.")
    processes: int = Field(0, ge=0, description="Client processes; 0 takes as many as the load needs.")


class RunSettings(LoadSettings):
    """One run."""

    concurrency: int | None = Field(None, ge=1, description="Closed loop: number of concurrent streams.")
    users: int | None = Field(
        None, ge=1, description="Closed loop: number of users, who pause for --think-s before each session."
    )
    rate_end: float | None = Field(None, gt=0, description="Open loop: final rate, reached linearly from --rate.")
