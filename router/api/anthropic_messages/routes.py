"""The routes of the Messages API."""

from functools import partial

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from cpd.common.blocks import TOKEN_BYTES
from router.api.anthropic_messages.documents import EVENTS, CountedTokens, MessageDocument, MessagesErrorResponse
from router.api.anthropic_messages.format import MessagesFormat
from router.api.anthropic_messages.parse import parse_messages
from router.api.anthropic_messages.request import CountTokensRequest, MessagesRequest
from router.api.anthropic_messages.to_chat import to_chat
from router.api.documentation import converts, generates
from router.api.gate import Endpoint
from router.api.intake import Intake, caller_of, json_response
from router.api.translation import named

COUNT_PATH = "/v1/messages/count_tokens"

MESSAGES_TYPES = (MessagesRequest, CountTokensRequest, MessagesErrorResponse, *EVENTS)
"""The types that the routes refer to."""


def add_messages(app: FastAPI, intake: Intake) -> dict[str, Endpoint]:
    """Adds the routes. Returns the endpoints that read a body, by path."""

    @app.post(
        "/v1/messages",
        **generates(MessagesRequest, MessageDocument, *EVENTS, ends="`message_stop`", error=MessagesErrorResponse),
    )
    async def create_message(request: Request) -> Response:
        """Generates the next message of a conversation, as Anthropic's API does."""
        caller = caller_of(request)
        asked = await intake.read(request, partial(parse_messages, kind=MessagesRequest))
        service = intake.find(request, asked.model)
        translated = await service.off_loop(lambda: to_chat(asked, service.sampling_defaults), caller)
        with named(translated.names):
            return await service.chat(translated.chat, caller, MessagesFormat)

    @app.post(COUNT_PATH, **converts(CountTokensRequest, CountedTokens, error=MessagesErrorResponse))
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of a conversation's prompt."""
        caller = caller_of(request)
        asked = await intake.read(request, partial(parse_messages, kind=CountTokensRequest))
        service = intake.find(request, asked.model)
        translated = await service.off_loop(lambda: to_chat(asked, service.sampling_defaults), caller)
        with named(translated.names):
            prompt, _ = await service.chat_prompt(translated.chat, caller)
        counted: CountedTokens = {"input_tokens": len(prompt) // TOKEN_BYTES}
        return json_response(counted)

    return {"/v1/messages": create_message, COUNT_PATH: count_tokens}
