"""How the mock server behaves: `Answering` to one request, `Behaviour` as a whole, `MockSettings` as a process."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from cpd.common.config import Settings


class Answering(BaseModel):
    """How a request is answered. A request overrides any of it with a field `mock` in its body."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_ms: float = Field(50.0, ge=0, description="From reading the request to sending the first chunk with text.")
    itl_ms: float = Field(5.0, ge=0, description="Between chunks with text.")
    output_tokens: int | None = Field(None, ge=0, description="Send this many, whatever max_tokens says.")
    tokens_per_chunk: int = Field(1, ge=1, description="Tokens in a chunk.")
    role_first: bool = Field(False, description="Begin, at once, with a chunk that has a role and no text (chat).")
    opening: Literal["reasoning_content", "reasoning", "tool_calls"] = Field(
        "reasoning_content", description="What the first --opening-tokens are, instead of content (chat)."
    )
    opening_tokens: int = Field(0, ge=0, description="Tokens that are no content.")
    usage: Literal["last", "every", "none"] = Field(
        "last", description="Token counts: in a last chunk, if asked for; in every chunk; or never."
    )
    cached_tokens: int = Field(0, ge=0, description="Prompt tokens that usage calls cached.")
    no_finish_reason: bool = Field(False, description="Never send a finish_reason.")
    no_done: bool = Field(False, description="Never send [DONE].")
    route: str = Field("", description="Value of the header x-cpd-route; empty sends none.")
    fault: Literal["", "status", "json", "garbage", "error", "cut", "reset", "hang"] = Field(
        "",
        description="What goes wrong. status: an HTTP error; json: a JSON body though a stream was asked for. After "
        "--fault-after chunks with text: garbage: an event that is no JSON; error: an error event; cut, reset: the "
        "connection ends; hang: nothing more comes.",
    )
    fault_after: int = Field(0, ge=0, description="Chunks with text before the fault.")
    fault_share: float = Field(1.0, ge=0, le=1, description="Share of the requests with the fault, evenly spread.")
    status: int = Field(500, ge=400, le=599, description="HTTP status of the fault `status`.")


class Behaviour(Answering):
    """How the server behaves."""

    model: str = Field("mock", description="The one model; requests for another get 404.")
    api_key: str = Field("", description="Bearer token that requests must carry; empty: none.")
    stall_at_s: float = Field(0.0, ge=0, description="When the stall begins, in seconds from the first request.")
    stall_s: float = Field(0.0, ge=0, description="For this long nothing is sent to anybody, once; 0: no stall.")
    prefill_us_per_token: float = Field(
        0.0, ge=0, description="While a prompt is prefilled, which takes this long a token, nothing is sent to anybody."
    )
    keep_sends: bool = Field(
        False,
        description="GET /sends answers when each prompt was read and each of its chunks with text sent, in seconds.",
    )


class MockSettings(Settings, Behaviour):
    """One mock server process."""

    model_config = SettingsConfigDict(env_prefix="CPD_BENCH_MOCK_")

    host: str = Field("127.0.0.1", description="Interface to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port; 0 takes a free one.")
