"""The server, and the body of a request to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import orjson

from bench.errors import BenchError
from bench.settings import TargetSettings
from bench.workloads.base import Message

# Fields that the client sets itself.
_FIXED = ("messages", "prompt", "max_tokens", "stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the common part of all requests to it.

    Args:
        url: `http` or `https` URL without a trailing slash and without `/v1`.
        model: Name of the model.
        api_key: Bearer token; "" sends none.
        endpoint: `chat` for `/v1/chat/completions`, `completions` for `/v1/completions`.
        temperature: Sampling temperature.
        ignore_eos: Send `"ignore_eos": true`.
        extra_body: Further fields of the body; they override `model`, `temperature` and `ignore_eos`.
        timeout_s: A request fails if nothing of its answer comes for this long.
    """

    url: str
    model: str
    api_key: str = field(repr=False)
    endpoint: Literal["chat", "completions"]
    temperature: float
    ignore_eos: bool
    extra_body: dict[str, Any]
    timeout_s: float

    @classmethod
    def of(cls, settings: TargetSettings, model: str) -> Self:
        """Makes a target from settings.

        Raises:
            BenchError: The URL, the key or `extra_body` is invalid.
        """
        return cls(
            url=_base_url(settings.url),
            model=model,
            api_key=_api_key(settings.api_key.get_secret_value()),
            endpoint=settings.endpoint,
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
            extra_body=_extra_body(settings.extra_body),
            timeout_s=settings.timeout_s,
        )

    @property
    def path(self) -> str:
        """Path of the endpoint under `url`."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, conversation: Sequence[Message], output_len: int) -> bytes:
        """JSON body of a streaming request for `output_len` tokens after `conversation`."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= self.extra_body
        if self.endpoint == "chat":
            body["messages"] = [{"role": message.role, "content": message.content} for message in conversation]
        else:
            body["prompt"] = "".join(message.content for message in conversation)
        body |= {"max_tokens": output_len, "stream": True, "stream_options": {"include_usage": True}}
        return orjson.dumps(body)


def _base_url(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port or the brackets of an IPv6 address
        usable = False
    if not usable or not base.isascii() or not base.isprintable() or " " in base:
        raise BenchError(f"--url {url!r} is not a server's URL: give one such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username is not None:
        raise BenchError(f"--url {url!r}: leave out the parts before @ and after ? or #; use --api-key for a key")
    return base


def _api_key(text: str) -> str:
    key = text.strip()
    if not key.isascii() or (key and not key.isprintable()):
        raise BenchError("--api-key has characters that are not allowed in an HTTP header")
    return key


def _extra_body(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        extra = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BenchError(f"--extra-body is not JSON ({error}): give an object such as '{{\"top_p\": 0.9}}'") from None
    if not isinstance(extra, dict):
        raise BenchError("--extra-body is not a JSON object: give one such as '{\"top_p\": 0.9}'")
    fixed = [name for name in _FIXED if name in extra]
    if fixed:
        raise BenchError(f"--extra-body: leave out {', '.join(fixed)}; the client sets them itself")
    return extra
