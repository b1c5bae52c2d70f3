"""The settings of `cpd bench`. Environment variables start with `CPD_BENCH_`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from cpd.common.config import Settings


class TargetSettings(Settings):
    """Which server is measured, and how it is asked."""

    model_config = SettingsConfigDict(env_prefix="CPD_BENCH_")

    url: str = Field("http://127.0.0.1:8000", description="The server; with or without a trailing /v1.")
    model: str = Field("", description="Model name; empty takes the first one that the server lists.")
    api_key: SecretStr = Field(SecretStr(""), description="Sent as a bearer token.")
    endpoint: Literal["chat", "completions"] = Field("chat", description="Which of the two endpoints is asked.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    ignore_eos: bool = Field(
        True,
        description="Ask for exactly --output-len tokens with the ignore_eos field, which vLLM, SGLang and cpd know.",
    )
    extra_body: str = Field("", description="JSON object of further fields for every request body.")
    timeout_s: float = Field(
        120.0, gt=0, description="A request of whose answer nothing came for this long has failed."
    )
    tokenizer: str = Field(
        "",
        description="Directory with the model's tokenizer.json: makes prompts of exact length, counts without usage.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="Repeats a run byte for byte; by default every run has new prompts, so that no cache helps.",
    )
    selftest: bool = Field(True, description="Measure the client itself first, for about two seconds.")
    json_file: Path | None = Field(
        None, description="Write the whole result here as JSON.", json_schema_extra={"flag": "--json"}
    )
    html_file: Path | None = Field(
        None, description="Write a report here, one self-contained page.", json_schema_extra={"flag": "--html"}
    )


class WorkloadSettings(TargetSettings):
    """What is asked."""

    workload: Literal["random", "shared-prefix", "multi-turn", "trace", "jsonl"] = Field(
        "random", description="Kind of prompts."
    )
    input_len: str = Field(
        "512",
        description="Prompt tokens: 512, or uniform:256,1024, normal:512,64 (mean, deviation), lognormal:512,0.5.",
    )
    output_len: str = Field("128", description="Output tokens, in the same form.")
    prefix_groups: int = Field(8, ge=1, description="shared-prefix: groups of prompts that begin alike.")
    hit_rate: float = Field(
        0.5, ge=0, lt=1, description="shared-prefix: share of the prompt tokens that a warm cache holds."
    )
    preset: Literal["", "heavy", "light"] = Field(
        "", description="multi-turn: heavy is 2048 first, 512 later, 256 out; light is 512, 256, 256."
    )
    turns: int = Field(5, ge=1, description="multi-turn: turns of a conversation.")
    later_len: str = Field("256", description="multi-turn: new prompt tokens of every turn but the first.")
    think_s: str = Field(
        "0",
        description="Seconds between an answer and a user's next turn, in the form of --input-len; also "
        "between the sessions of a closed loop of users.",
    )
    file: Path | None = Field(
        None, description="trace: Mooncake JSONL. jsonl: prompts or messages a line, or ShareGPT."
    )
    speedup: float = Field(1.0, gt=0, description="trace: its time runs this many times faster.")


class LoadSettings(WorkloadSettings):
    """How a server is loaded, and how the answers are judged."""

    rate: float | None = Field(None, gt=0, description="Open loop: sessions a second, whatever the server does.")
    arrival: Literal["poisson", "gamma", "constant"] = Field("poisson", description="Open loop: gaps between sessions.")
    burstiness: float = Field(
        1.0, gt=0, description="gamma: its shape; 1 is Poisson, smaller is burstier, larger is steadier."
    )
    num_requests: int | None = Field(
        None, ge=1, description="Sessions to send; by default 200, or all of a file, or what --duration holds."
    )
    duration: float | None = Field(None, gt=0, description="Stop sending after this many seconds; what runs may end.")
    slo: str = Field("", description="Latency targets of goodput in ms, such as ttft=2000,itl=50,e2e=10000.")
    processes: int = Field(0, ge=0, description="Client processes; 0 takes as many as the load needs.")


class RunSettings(LoadSettings):
    """One run."""

    concurrency: int | None = Field(None, ge=1, description="Closed loop: this many streams at a time, always.")
    users: int | None = Field(
        None, ge=1, description="Closed loop of users that pause for --think-s between a session and their next."
    )
    rate_end: float | None = Field(None, gt=0, description="Open loop: the rate moves evenly from --rate to this one.")
