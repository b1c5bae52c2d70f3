"""Turns a valid request into a running completion: renders, tokenises, checks limits and dispatches."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from cpd.common.blocks import BLOCK_SIZE, TOKEN_BYTES, extend_hashes, hash_root, largest_token, pack_tokens
from cpd.common.settings import RouterSettings
from cpd.grammar.grammar import Grammar
from cpd.rpc import cpd_pb2 as pb
from router.api.call_traces import begin_call
from router.api.chat_messages import Message, Tool, template_message, template_tool
from router.api.format import ChatForm, Format, Parsing
from router.api.openai import CompletionFormat, EchoedCompletionFormat
from router.api.output_grammars import OutputGrammars
from router.api.parsed_chat import chat_format
from router.api.respond import CompletionResponse
from router.api.responses import ApiFinishReason
from router.api.sampling import sampling_message
from router.api.schemas import ChatRequest, CompletionRequest, GenerateRequest
from router.api.structured import grammar_of, refusal
from router.api.tenant_limits import Admission
from router.api.tenants import Tenant
from router.dispatch.attempts import RoutedRequest
from router.dispatch.dispatcher import RETRY_S, Dispatcher
from router.dispatch.output import Choice
from router.dispatch.workers import Workers
from router.errors import invalid, unavailable, unsupported
from router.placement.policies import make_policy
from router.placement.policy import Targets
from router.request_metrics import RequestMetrics
from router.text.detokenize import Vocabulary
from router.text.parsers.output import detect
from router.text.template import ChatTemplate
from router.text.text_files import TextFiles

if TYPE_CHECKING:
    from cpd.common.tracing import TracedSpan

_MANY_CHARS = 16
"""Nearly all tokens have fewer characters than this."""

_END_CHARS = 64
"""Characters at the end of a prompt in which an opened `<think>` is looked for."""

INLINE_BYTES = 32_768
"""Size of the largest body that is parsed and rendered on the event loop, usually in less than a millisecond."""

T = TypeVar("T")

_PIECE_BYTES = 512 * BLOCK_SIZE * TOKEN_BYTES
"""Prompt bytes hashed at a time, in about half a millisecond. Other tasks run in between."""


@dataclass(slots=True)
class Caller:
    """The caller of the API.

    Attributes:
        request_id: Sent back with the response, and used in logs.
        started: Loop time at which the request's head was read.
        admission: Counts what the call uses of its tenant's limits.
        needed_at: Loop time after which the caller has no use for a first token.
        ticks: The caller wants to know the time of each token afterwards.
        trace: Its span; None if it is not traced.
    """

    tenant: Tenant
    request_id: str
    started: float
    admission: Admission
    needed_at: float = inf
    ticks: bool = False
    trace: "TracedSpan | None" = None


class CompletionService:
    """Starts chat and text completions of one model.

    Args:
        sampling_defaults: Sampling fields whose defaults differ from OpenAI's.
        aliases: Other names of the model in the API.

    Attributes:
        names: All its names.
        output_format: How the model writes reasoning and tool calls.
    """

    def __init__(
        self,
        settings: RouterSettings,
        text_files: TextFiles,
        sampling_defaults: Mapping[str, float],
        workers: Workers,
        metrics: RequestMetrics,
        aliases: Sequence[str] = (),
    ) -> None:
        self.text_files = text_files
        self.aliases = aliases
        self.names = frozenset({text_files.name, *aliases})
        self.sampling_defaults = sampling_defaults
        self.workers = workers
        self.metrics = metrics
        self.settings = settings
        source = text_files.tool_template.source if text_files.tool_template is not None else ""
        self.output_format = detect(source, settings.tool_call_parser, settings.reasoning_parser)
        self._may_reason = bool(detect(source).reasoning)
        self._grammars = OutputGrammars(text_files, workers, self.output_format)
        targets = Targets(settings.slo_ttft, settings.slo_itl, settings.long_prefill_tokens)
        policy, rng = make_policy(settings.policy), Random(secrets.randbits(64))
        self.dispatcher = Dispatcher(workers, metrics, policy, targets, max_wait_s=settings.max_wait_s, rng=rng)

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.text_files.name

    async def off_loop(self, call: Callable[[], T], caller: Caller) -> T:
        """Returns what `call` returns: on a thread that tenants share fairly, if the request's body is large."""
        work = caller.admission.body_bytes
        if work <= INLINE_BYTES:
            return call()
        return await self.text_files.tokenizer.threads.run(caller.tenant.salt, work, call)

    async def chat(self, request: ChatRequest, caller: Caller, form: ChatForm = chat_format) -> CompletionResponse:
        """Starts a chat completion.

        Args:
            form: Makes what writes the response.

        Raises:
            ApiError: The request can't be served; nothing was started.
        """
        tenant, tools, output = caller.tenant.salt, request.offered_tools, self.output_format
        asked = await self._asked(request, caller)
        prompt, end = await self.chat_prompt(request, caller)
        of_calls = await self.off_loop(partial(self._grammars.of_calls, request, asked, end), caller)
        grammar = await self._grammars.checked(of_calls, tenant)
        if grammar is None and asked is not None:  # the answer's grammar leaves no room for calls
            tools, grammar = (), self._grammars.behind_reasoning(*asked, end)
            if grammar is None:  # nor for reasoning
                unparsed = partial(form, parsing=None)
                return await self._start(request, [prompt], caller, "messages", unparsed, asked[1])
        if request.thinking_token_budget is not None and self._may_reason and not output.reasoning:
            raise unsupported("thinking_token_budget")
        if not (tools or output.reasoning):
            return await self._start(request, [prompt], caller, "messages", partial(form, parsing=None), None)
        names = [tool.function.name for tool in tools]
        parallel, forced = request.parallel_tool_calls, request.forces_calls
        new_parser = partial(output.parser, end, names, parallel=parallel, forced=forced)
        finish: ApiFinishReason = "tool_calls" if request.chosen_tool is None else "stop"  # as in vLLM
        parsed = partial(form, parsing=Parsing(new_parser, finish))
        shown = output.markers(tools=bool(tools))
        budget = self._thinking_budget(request, end)
        return await self._start(request, [prompt], caller, "messages", parsed, grammar, shown, budget)

    async def chat_prompt(self, request: ChatRequest, caller: Caller) -> tuple[bytes, str]:
        """Returns the prompt of a chat as packed token ids, and the end of its text.

        Raises:
            ApiError: As `chat_text`.
        """
        kwargs, tools = self._template_kwargs(request), request.offered_tools
        text = await self.chat_text(request.messages, kwargs, tools, caller)
        return await self.text_files.tokenizer.encode_chat(text, caller.tenant.salt), text[-_END_CHARS:]

    async def complete(self, request: CompletionRequest, caller: Caller) -> CompletionResponse:
        """Starts a text completion.

        Raises:
            ApiError: The request can't be served; nothing was started.
        """
        asked = await self._asked(request, caller)
        grammar = None if asked is None else asked[1]
        for prompt in request.prompts:
            if isinstance(prompt, str):
                await self.check_text(prompt, caller, "prompt")
        prompts = [
            await self.text_files.tokenizer.encode(prompt, caller.tenant.salt)
            if isinstance(prompt, str)
            else pack_tokens(prompt)
            for prompt in request.prompts
        ]
        form: Callable[[GenerateRequest, Vocabulary, bytes], Format] = CompletionFormat
        if request.echo:
            form = partial(EchoedCompletionFormat, prompts=await self.off_loop(partial(self._texts, request), caller))
        return await self._start(request, prompts, caller, "prompt", form, grammar)

    async def _asked(self, request: GenerateRequest, caller: Caller) -> tuple[str, Grammar] | None:
        """Returns the field that constrains a request's answer, and its grammar; see `OutputGrammars.asked`."""
        found = await self.off_loop(partial(grammar_of, request), caller)
        return await self._grammars.asked(request, found, caller.tenant.salt)

    def _texts(self, request: CompletionRequest) -> list[str]:
        decode = self.text_files.tokenizer.decode
        return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in request.prompts]

    async def chat_text(
        self, messages: Sequence[Message], kwargs: Mapping[str, Any], tools: Sequence[Tool], caller: Caller
    ) -> str:
        """Returns the prompt text of a chat, up to the start of the answer.

        Args:
            kwargs: Additional variables for the chat template.

        Raises:
            ApiError: The model has no chat template, or it refuses the chat, or knows no tools.
        """
        template = self._template(with_tools=bool(tools))
        if tools:
            self._check_tools_work(template)
        written_tools = [template_tool(tool) for tool in tools]

        def render() -> str:
            return template.render([template_message(message) for message in messages], kwargs, written_tools)

        text = await self.off_loop(render, caller)
        await self.check_text(text, caller, "messages")
        return text

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        template = self.text_files.tool_template if with_tools else self.text_files.template
        if template is None:
            message = "This model has no chat template; use /v1/completions."
            raise invalid("messages", message, code="no_chat_template")
        return template

    def _check_tools_work(self, template: ChatTemplate) -> None:
        """Raises ApiError if the model can't be told of tools, or how it calls them is not known."""
        if not template.knows("tools"):
            raise invalid("tools", "This model's chat template has no tools.", code="unsupported_parameter")
        if not self.output_format.tools:
            message = "How this model calls tools is not known; the operator can set --tool-call-parser."
            raise invalid("tools", message, code="unsupported_parameter")

    def _template_kwargs(self, request: ChatRequest) -> Mapping[str, Any]:
        """The template's variables, with what `reasoning_effort` means to it."""
        effort, kwargs = request.reasoning_effort, request.chat_template_kwargs
        if effort is None:
            return kwargs
        template = self._template(with_tools=bool(request.offered_tools))
        if template.knows("reasoning_effort"):
            return {"reasoning_effort": effort, **kwargs}
        if template.knows("enable_thinking"):
            return {"enable_thinking": effort != "none", **kwargs}
        if effort == "none" and not self._may_reason:
            return kwargs
        raise unsupported("reasoning_effort")

    def _thinking_budget(self, request: ChatRequest, prompt: str) -> pb.ThinkingBudget | None:
        """Returns the limit on the reasoning of a chat's outputs; None if it has none.

        Args:
            prompt: The end of the prompt's text.

        Raises:
            ApiError: The limit can't be kept.
        """
        tokens, output = request.thinking_token_budget, self.output_format
        if tokens is None or not output.may_reason(prompt):
            return None
        begin, end = output.reasoning_tokens(prompt, self.text_files.tokenizer.token_id)
        if end is None:
            reason = "the reasoning of this model has no tokens of its own around it"
            raise refusal("thinking_token_budget", reason, code="unsupported_parameter")
        if self.workers.ready and not self.workers.any_with_grammars:
            reason = "no worker of this cluster can constrain outputs"
            raise refusal("thinking_token_budget", reason, code="unsupported_parameter")
        return pb.ThinkingBudget(tokens=tokens, end_token=end, start_token=begin)

    async def _start(
        self,
        request: GenerateRequest,
        prompts: list[bytes],
        caller: Caller,
        param: str,
        form: Callable[[GenerateRequest, Vocabulary, bytes], Format],
        grammar: Grammar | None,
        shown: frozenset[str] = frozenset(),
        thinking_budget: pb.ThinkingBudget | None = None,
    ) -> CompletionResponse:
        """Starts the requests for the prompts. `shown` are special tokens that have text in the outputs."""
        priority = caller.tenant.priority(request.priority)
        if not self.workers.ready:
            raise unavailable("No worker is ready to serve the model.", RETRY_S)
        for prompt in prompts:
            self._check_prompt(prompt, request.output_limit, param)
        model = self.workers.model  # read before the first await, since workers may change meanwhile
        seed = secrets.randbits(63) if request.seed is None else request.seed & ((1 << 63) - 1)
        samplings = [
            sampling_message(
                request,
                seed=seed,
                max_tokens=request.output_limit or model.max_model_len - len(prompt) // TOKEN_BYTES,
                vocab_size=model.vocab_size,
                eos_ids=self.text_files.eos_ids,
                grammar=grammar,
                thinking_budget=thinking_budget,
            )
            for prompt in prompts
        ]
        root = hash_root(model.fingerprint, caller.tenant.salt)
        hashes = [await _hash(root, prompt) for prompt in prompts]
        vocabulary, n = self.text_files.tokenizer.vocabulary_showing(shown), request.n
        choices = [
            Choice(
                index,
                vocabulary.detokenizer(prompt),
                request.stops,
                request.min_tokens,
                request.include_stop_str_in_output,
            )
            for index, prompt in enumerate(prompt for prompt in prompts for _ in range(n))
        ]
        response = CompletionResponse(
            self.dispatcher,
            self.metrics,
            request,
            form(request, vocabulary, model.fingerprint),
            choices,
            received=caller.started,
            charge=caller.admission.charge,
        )
        response.requests = [
            RoutedRequest(
                trace_id=caller.request_id,
                tenant=caller.tenant.name,
                tokens=prompt,
                fingerprint=model.fingerprint,
                hash_root=root,
                block_hashes=hashes[position],
                sampling=samplings[position],
                choices=choices[position * n : (position + 1) * n],
                consumer=response,
                priority=-priority,
                received=caller.started,
                needed_at=caller.needed_at,
                ticks=caller.ticks,
                trace=caller.trace,
            )
            for position, prompt in enumerate(prompts)
        ]
        if caller.trace is not None:
            begin_call(caller.trace, request, self.name)
        try:
            for routed in response.requests:
                self.dispatcher.start(routed)
        except BaseException:
            response.cancel()
            response.forget()
            raise
        caller.admission.charge(sum(routed.prompt_len for routed in response.requests))
        return response

    async def check_text(self, text: str, caller: Caller, param: str) -> None:
        """Raises ApiError if the start of a long text has more than twice the tokens of the context.

        Tokenising all of it could take many seconds, while other long prompts wait.
        """
        context = self.workers.model.max_model_len
        chars = context * _MANY_CHARS
        while 0 < chars < len(text):
            beginning = await self.text_files.tokenizer.encode(text[:chars], caller.tenant.salt)
            if len(beginning) // TOKEN_BYTES > 2 * context:
                message = (
                    f"This model's maximum context length is {context} tokens. However, the {param} alone has more "
                    f"than {2 * context}. Please reduce its length."
                )
                raise invalid(param, message, code="context_length_exceeded")
            chars *= 4

    def _check_prompt(self, prompt: bytes, output_limit: int | None, param: str) -> None:
        """Raises ApiError if the prompt is empty, too long or has invalid tokens."""
        if not prompt:
            raise invalid(param, f"'{param}' is empty: there is no token to continue from.")
        vocab_size, largest = self.workers.model.vocab_size, largest_token(prompt)
        if largest >= vocab_size:
            raise invalid(param, f"'{param}' has token id {largest}, but the model's vocabulary has {vocab_size}.")
        context = self.workers.model.max_model_len
        tokens, wanted = len(prompt) // TOKEN_BYTES, output_limit or 1
        if tokens + wanted > context:
            raise invalid(
                param,
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{tokens + wanted} tokens ({tokens} in the {param}, {wanted} in the completion). "
                f"Please reduce the length of the {param} or completion.",
                code="context_length_exceeded",
            )


async def _hash(root: bytes, tokens: bytes) -> list[bytes]:
    """Returns the hashes of a prompt's full blocks."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens), _PIECE_BYTES):
        if start:
            await asyncio.sleep(0)
        hashes += extend_hashes(hashes[-1] if hashes else root, tokens[start : start + _PIECE_BYTES])
    return hashes
