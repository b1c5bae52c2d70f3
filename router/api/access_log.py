"""One log line for each call of a route that generates or converts text, however it ended. It has no prompts and no
answers."""

import asyncio
import logging
from dataclasses import dataclass

from cpd.common.logs import ACCESS_LOGGER, fields
from router.activity import Activity
from router.api.respond import CompletionResponse

log = logging.getLogger(ACCESS_LOGGER)


@dataclass(slots=True)
class CallStart:
    """What is known of a call before its response.

    Attributes:
        tenant: The tenant's name.
        started: Loop time at which the head was read.
        model: Name of the model; empty if it is not known.
    """

    path: str
    request_id: str
    tenant: str
    started: float
    model: str = ""


class AccessLog:
    """Writes the lines and counts the calls.

    Args:
        model: Name of the model if there is only one, else empty.
    """

    def __init__(self, model: str, activity: Activity) -> None:
        self._model = model
        self._activity = activity

    def add(
        self, call: CallStart, *, status: int, outcome: str, code: str, response: CompletionResponse | None
    ) -> None:
        """Adds a call that has ended.

        Args:
            status: HTTP status; 0 if the client hung up before it got one.
            outcome: `completed`, `error` or `client_gone`.
            code: Code of the error.
            response: None if no request was started.
        """
        self._activity.calls += 1
        self._activity.errors += outcome == "error"
        if not log.isEnabledFor(logging.INFO):
            return
        about: dict[str, object] = {
            "path": call.path,
            "request_id": call.request_id,
            "tenant": call.tenant,
            "model": call.model or self._model,
            "outcome": outcome,
        }
        if status:
            about["status"] = status
        if code:
            about["code"] = code
        if response is not None:
            about.update(response.report())
        about["duration_ms"] = round((asyncio.get_running_loop().time() - call.started) * 1e3, 1)
        log.info("call", extra=fields(**about))
