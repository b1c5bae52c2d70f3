"""From a valid request to a running completion: prompt text, tokens, limits, placement."""

import asyncio
import secrets
from dataclasses import dataclass
from random import Random

from cpd.blocks import BLOCK_SIZE, TOKEN_BYTES, extend_hashes, hash_root, largest_token, pack_tokens
from cpd.config import RouterSettings
from cpd.rpc import cpd_pb2 as pb
from router.checkpoint import Checkpoint
from router.completion import Completion, PromptConsumer
from router.costs import PolicySettings
from router.errors import invalid, unavailable
from router.legs import Request
from router.metrics import Metrics
from router.openai import ChatFormat, CompletionFormat, Format, Shape
from router.output import Choice
from router.requests import RETRY_S, Dispatcher
from router.schemas import ChatRequest, CompletionRequest, GenerateRequest
from router.tenants import Tenant
from router.workers import Workers

_LEAST_TOP_P = 1e-6
"""What top_p = 0 becomes: the most likely token alone."""

_MANY_CHARS = 16
"""A token has fewer, nearly always."""

_PIECE_BYTES = 512 * BLOCK_SIZE * TOKEN_BYTES
"""Hashed at a time, in about half a millisecond; other work has its turn before the next ones."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        request_id: Returned in the response, and used in logs.
        started: Loop time at which the call was read.
    """

    tenant: Tenant
    request_id: str
    started: float


class Service:
    """What the router does for its clients, without HTTP."""

    def __init__(self, settings: RouterSettings, checkpoint: Checkpoint, workers: Workers, metrics: Metrics) -> None:
        self.checkpoint = checkpoint
        self.workers = workers
        self.metrics = metrics
        self.settings = settings
        policy = PolicySettings(settings.slo_ttft, settings.slo_itl, settings.long_prefill_tokens)
        self.dispatcher = Dispatcher(workers, metrics, policy, rng=Random(secrets.randbits(64)))

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) where `name` is not the model served here."""
        if name != self.checkpoint.name:
            message = f"The model '{name}' does not exist. This server has '{self.checkpoint.name}'."
            raise invalid("model", message, code="model_not_found", status=404)

    async def chat(self, request: ChatRequest, caller: Caller) -> tuple[Completion, Format]:
        """Starts a chat completion.

        Raises:
            ApiError: The request can't be served; nothing was started.
        """
        self.check_model(request.model)
        caller.tenant.check_priority(request.priority)
        if self.checkpoint.template is None:
            message = "This model has no chat template; use /v1/completions."
            raise invalid("messages", message, code="no_chat_template")
        messages = [one.model_dump(exclude_none=True) for one in request.messages]
        text = self.checkpoint.template.render(messages, request.chat_template_kwargs)
        await self._check_text(text, "messages")
        prompt = await self.checkpoint.tokenizer.encode_chat(text, caller.tenant.salt)
        completion = await self._start(request, [prompt], caller, "messages")
        return completion, ChatFormat(self._shape(request, "chatcmpl"), self.checkpoint.vocabulary)

    async def complete(self, request: CompletionRequest, caller: Caller) -> tuple[Completion, Format]:
        """Starts a text completion.

        Raises:
            ApiError: The request can't be served; nothing was started.
        """
        self.check_model(request.model)
        caller.tenant.check_priority(request.priority)
        encode = self.checkpoint.tokenizer.encode
        for prompt in request.prompts:
            if isinstance(prompt, str):
                await self._check_text(prompt, "prompt")
        prompts = [
            await encode(prompt) if isinstance(prompt, str) else pack_tokens(prompt) for prompt in request.prompts
        ]
        completion = await self._start(request, prompts, caller, "prompt")
        return completion, CompletionFormat(self._shape(request, "cmpl"), self.checkpoint.vocabulary)

    def _shape(self, request: GenerateRequest, prefix: str) -> Shape:
        return Shape(
            id=f"{prefix}-{secrets.token_hex(12)}",
            model=self.checkpoint.name,
            fingerprint=f"fp_{self.workers.fingerprint.hex()[:10]}",
            include_usage=request.include_usage,
            logprobs=request.alternatives is not None,
            token_ids=request.return_token_ids,
            n=request.n,
        )

    async def _start(self, request: GenerateRequest, prompts: list[bytes], caller: Caller, param: str) -> Completion:
        if not self.workers.ready:
            raise unavailable("No worker is ready to serve the model.", RETRY_S)
        for prompt in prompts:
            self._check_prompt(prompt, request.output_limit, param)
        # what follows from the workers, before any of them can go or come
        context, fingerprint = self.workers.max_model_len, self.workers.fingerprint
        seed = secrets.randbits(63) if request.seed is None else request.seed & ((1 << 63) - 1)
        samplings = [
            self._sampling(request, seed, request.output_limit or context - len(prompt) // TOKEN_BYTES)
            for prompt in prompts
        ]
        root = hash_root(fingerprint, caller.tenant.salt)
        hashes = [await _hash(root, prompt) for prompt in prompts]
        choices = [
            Choice(index, self.checkpoint.vocabulary.detokenizer(prompt), request.stops, request.min_tokens)
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n))
        ]
        completion = Completion(self.dispatcher, self.metrics, choices, eager=request.stream, started=caller.started)
        try:
            for position, prompt in enumerate(prompts):
                own = choices[position * request.n : (position + 1) * request.n]
                completion.start(
                    Request(
                        trace_id=caller.request_id,
                        tenant=caller.tenant.name,
                        tokens=prompt,
                        fingerprint=fingerprint,
                        hash_root=root,
                        block_hashes=hashes[position],
                        sampling=samplings[position],
                        n=request.n,
                        consumer=PromptConsumer(completion, self.metrics, own),
                        priority=-request.priority,
                        received=caller.started,
                    )
                )
        except BaseException:
            completion.cancel()
            raise
        return completion

    async def _check_text(self, text: str, param: str) -> None:
        """Raises ApiError where a beginning of the text, twice as long as the context, shows that it is too long: all
        of it can take many seconds, in which other long prompts wait."""
        context = self.workers.max_model_len
        chars = context * _MANY_CHARS
        while 0 < chars < len(text):
            beginning = await self.checkpoint.tokenizer.encode(text[:chars])
            if len(beginning) // TOKEN_BYTES > 2 * context:
                message = (
                    f"This model's maximum context length is {context} tokens. However, the {param} alone has more "
                    f"than {2 * context}. Please reduce its length."
                )
                raise invalid(param, message, code="context_length_exceeded")
            chars *= 4

    def _check_prompt(self, prompt: bytes, output_limit: int | None, param: str) -> None:
        """Raises ApiError where the prompt can't be run."""
        if not prompt:
            raise invalid(param, f"'{param}' is empty: it gives no token to continue from.")
        vocab_size, largest = self.workers.vocab_size, largest_token(prompt)
        if largest >= vocab_size:
            raise invalid(param, f"'{param}' has token id {largest}, but the model's vocabulary has {vocab_size}.")
        context = self.workers.max_model_len
        tokens, wanted = len(prompt) // TOKEN_BYTES, output_limit or 1
        if tokens + wanted > context:
            raise invalid(
                param,
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{tokens + wanted} tokens ({tokens} in the {param}, {wanted} in the completion). "
                f"Please reduce the length of the {param} or completion.",
                code="context_length_exceeded",
            )

    def _sampling(self, request: GenerateRequest, seed: int, max_tokens: int) -> pb.Sampling:
        """The request's sampling as on the wire."""
        vocab_size = self.workers.vocab_size
        bias = {int(token_id): value for token_id, value in request.logit_bias.items()}
        if bias and max(bias) >= vocab_size:
            message = f"'logit_bias' has token id {max(bias)}, but the model's vocabulary has {vocab_size}."
            raise invalid("logit_bias", message)
        return pb.Sampling(
            temperature=request.temperature,
            top_p=max(request.top_p, _LEAST_TOP_P),
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=bias,
            seed=seed,
            top_logprobs=request.alternatives,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=() if request.ignore_eos else self.checkpoint.eos_ids,
        )


async def _hash(root: bytes, tokens: bytes) -> list[bytes]:
    """The hashes of a prompt's full blocks."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens), _PIECE_BYTES):
        if start:
            await asyncio.sleep(0)
        hashes += extend_hashes(hashes[-1] if hashes else root, tokens[start : start + _PIECE_BYTES])
    return hashes
