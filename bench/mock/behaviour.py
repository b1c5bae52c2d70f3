"""Settings of the mock server: `Answering` per request, `Behaviour` per server, `MockSettings` per process."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from cpd.common.settings import Settings


class Answering(BaseModel):
    """How to answer a request. The field `mock` in a request's body overrides these settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = Field(50.0, ge=0, description="Time from reading a request to sending the first chunk with text.")
    itl_ms: float = Field(5.0, ge=0, description="Time between chunks with text.")
    output_tokens: int | None = Field(None, ge=0, description="Send this many tokens, ignoring max_tokens.")
    tokens_per_chunk: int = Field(1, ge=1, description="Tokens per chunk.")
    role_first: bool = Field(False, description="Begin at once with a chunk that has a role and no text (chat).")
    opening: Literal["reasoning_content", "reasoning", "tool_calls"] = Field(
        "reasoning_content", description="Field of the first --opening-tokens, instead of content (chat)."
    )
    opening_tokens: int = Field(0, ge=0, description="Number of first tokens that are not content.")
    usage: Literal["last", "every", "none"] = Field(
        "last", description="Send token counts in a last chunk if requested, in every chunk, or never."
    )
    cached_tokens: int = Field(0, ge=0, description="Cached prompt tokens reported in the usage.")
    no_finish_reason: bool = Field(False, description="Never send a finish_reason.")
    no_done: bool = Field(False, description="Never send [DONE].")
    route: str = Field("", description="Value of the header x-cpd-route; empty for none.")
    fault: Literal["", "status", "json", "garbage", "error", "cut", "reset", "hang"] = Field(
        "",
        description="Fault. status: an HTTP error; json: a JSON body instead of a stream. After --fault-after chunks "
        "with text: garbage: an event that is not JSON; error: an error event; cut, reset: the connection ends; hang: "
        "nothing more comes.",
    )
    fault_after: int = Field(0, ge=0, description="Chunks with text before the fault.")
    fault_share: float = Field(1.0, ge=0, le=1, description="Share of the requests that get the fault, evenly spread.")
    status: int = Field(500, ge=400, le=599, description="HTTP status of the fault `status`.")


class Behaviour(Answering):
    """Settings of the whole server."""

    model: str = Field("mock", description="Name of its model; requests for another model get 404.")
    api_key: str = Field("", description="Bearer token that requests must have; empty for none.")
    stall_at_s: float = Field(0.0, ge=0, description="Start of the stall, in seconds from the first request.")
    stall_s: float = Field(0.0, ge=0, description="Length of a single stall in which nothing is sent; 0 for none.")
    prefill_us_per_token: float = Field(
        0.0, ge=0, description="Time to prefill a prompt token; nothing is sent during a prefill."
    )
    keep_sends: bool = Field(
        False,
        description="GET /sends returns, by prompt, the times at which it was read and its chunks were sent.",
    )


class MockSettings(Settings, Behaviour):
    """Settings of a mock server process."""

    model_config = SettingsConfigDict(env_prefix="CPD_BENCH_MOCK_")

    host: str = Field("127.0.0.1", description="Interface to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port; 0 picks a free one.")
