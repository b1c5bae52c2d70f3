"""What the span of a call says, by OpenTelemetry's conventions for generative AI. It has no prompts and no answers."""

import time
from typing import TYPE_CHECKING

from router.api.schemas import ChatRequest, GenerateRequest

if TYPE_CHECKING:
    from cpd.common.tracing import TracedSpan, Value
    from router.api.respond import CompletionResponse

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def begin_call(trace: "TracedSpan", request: GenerateRequest, model: str) -> None:
    """Describes a valid request, which has been prepared and is about to be placed."""
    operation = "chat" if isinstance(request, ChatRequest) else "text_completion"
    about: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "cpd",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.choice.count": request.n,
    }
    if request.output_limit:
        about["gen_ai.request.max_tokens"] = request.output_limit
    for name in _SAMPLING:
        if (value := getattr(request, name)) is not None:
            about[f"gen_ai.request.{name}"] = value
    trace.name(f"{operation} {model}")
    trace.set(about)
    trace.phase("prepare", time.monotonic())


def end_call(
    trace: "TracedSpan", response: "CompletionResponse | None", *, status: int, outcome: str, code: str
) -> None:
    """Describes how a call ended.

    Args:
        response: None if no request was started.
        status, outcome, code: See `AccessLog.add`.
    """
    about: dict[str, Value] = {"cpd.outcome": outcome}
    if status:
        about["http.response.status_code"] = status
    if code:
        about["error.type"] = code
    if response is not None:
        about |= response.trace_report()
    trace.set(about)
    trace.end(time.monotonic(), code)
