"""`/tokenize` and `/detokenize`: what the model sees of a text or a chat, in vLLM's format."""

import asyncio
from collections.abc import Sequence
from functools import partial

from cpd.common.blocks import unpack_tokens
from router.api.completions import Caller, CompletionService
from router.api.responses import Detokenized, Tokenized
from router.api.schemas import DetokenizeRequest, TokenizeRequest
from router.text.tokenizer import Tokenizer

_PIECE_TOKENS = 1024
"""Tokens whose strings are looked up at a time, in about a millisecond. Other tasks run in between."""


async def tokenize(service: CompletionService, request: TokenizeRequest, caller: Caller) -> Tokenized:
    """Returns the tokens of a prompt.

    Raises:
        ApiError: The model's chat template refuses the chat.
    """
    tokenizer = service.text_files.tokenizer
    if request.messages is not None:
        text = await service.chat_text(request.messages, request.chat_template_kwargs, request.tools, caller)
        packed = await tokenizer.encode_chat(text, caller.tenant.salt)
    else:
        prompt = request.prompt or ""
        await service.check_text(prompt, caller, "prompt")
        packed = await tokenizer.encode(prompt, caller.tenant.salt, special_tokens=request.add_special_tokens)
    tokens = unpack_tokens(packed).tolist()
    return {
        "count": len(tokens),
        "max_model_len": service.workers.model.max_model_len or None,
        "tokens": tokens,
        "token_strs": await _strings(tokenizer, tokens) if request.return_token_strs else None,
    }


async def _strings(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    strings: list[str] = []
    for start in range(0, len(tokens), _PIECE_TOKENS):
        if start:
            await asyncio.sleep(0)
        strings += map(tokenizer.token, tokens[start : start + _PIECE_TOKENS])
    return strings


async def detokenize(service: CompletionService, request: DetokenizeRequest, caller: Caller) -> Detokenized:
    """Returns the text of tokens."""
    return {"prompt": await service.off_loop(partial(service.text_files.tokenizer.decode, request.tokens), caller)}
