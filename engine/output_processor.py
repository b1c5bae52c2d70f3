"""Sampled tokens become outputs: finish reasons, forks of choices, progress of prefill-only requests."""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count, islice

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Sampled
from engine.scheduling.plan import Chunk, Plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.types import Computed, Finish, Output, Request, StepOutput

MAX_UNANSWERED = 1024
"""Most requests that `unanswered` names."""


class OutputProcessor:
    """Knows the sequences of every request that has not finished.

    Args:
        release: Takes the pages that a finished sequence leaves.

    Attributes:
        prefill_tokens: Computed in chunks so far; after a preemption some a second time.
        decode_tokens: Computed one a step so far, after a choice's first output.
        shown_pages: Of finished prefill-only requests, held until the caller has had the chance to pin them.
    """

    def __init__(self, scheduler: Scheduler, release: Callable[[Sequence, list[int]], None]) -> None:
        self._scheduler = scheduler
        self._release = release
        self._max_model_len = scheduler.table.max_len
        self._seqs: dict[str, list[Sequence]] = {}
        self._arrivals = count()
        self.shown_pages: list[int] = []
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def seqs(self) -> list[Sequence]:
        """The sequences of all requests."""
        return [seq for seqs in self._seqs.values() for seq in seqs]

    def unanswered(self) -> list[int]:
        """Routers' numbers of the newest requests that have no token yet."""
        newest = islice(reversed(self._seqs.values()), MAX_UNANSWERED)
        return [seqs[0].request.number for seqs in newest if not seqs[0].first_token_sent]

    def check(self, request: Request) -> None:
        """Raises ValueError if the request can never be served, or not as it is."""
        tokens, limit = len(request.token_ids), self._max_model_len
        if not 0 < request.prompt_len <= tokens:
            raise ValueError("the prompt is empty")
        if tokens >= limit:
            raise ValueError(
                f"{tokens} tokens leave no room for output in a context of {limit}; this is the smaller of "
                f"the model's limit and what the KV memory holds"
            )
        if tokens - request.prompt_len >= request.params.max_tokens:
            raise ValueError(f"max_tokens ({request.params.max_tokens}) leaves nothing to generate")
        if request.n < 1 or (request.n > 1 and tokens > request.prompt_len):
            raise ValueError(f"n = {request.n} does not fit a request with {tokens - request.prompt_len} output tokens")
        if len(request.block_hashes) != tokens // BLOCK_SIZE:
            raise ValueError(f"{len(request.block_hashes)} block hashes do not fit {tokens} tokens")
        if request.id in self._seqs:
            raise ValueError(f"request {request.id!r} exists already")

    def open(self, request: Request, choices: list[int]) -> Sequence:
        """A new sequence for all these choices."""
        seq = Sequence(
            request=request,
            choices=choices,
            order=(next(self._arrivals), request.first_choice),
            hashes=list(request.block_hashes),
            tokens=np.array(request.token_ids, dtype=np.int32),
            num_tokens=len(request.token_ids),
        )
        self._seqs.setdefault(request.id, []).append(seq)
        return seq

    def end_choices(self, request_id: str, choices: Collection[int] | None = None) -> None:
        """Ends these choices (None: all); those that the request does not have are ignored."""
        for seq in tuple(self._seqs.get(request_id, ())):
            seq.choices = [] if choices is None else [choice for choice in seq.choices if choice not in choices]
            if not seq.choices:
                self._release(seq, self._close(seq))

    def process(self, plan: Plan, sampled: Iterable[Sampled], step: StepOutput) -> None:
        """A lane has computed a plan.

        Args:
            sampled: In the order of the batch's samples.
            step: Gets the outputs.
        """
        tokens = iter(sampled)
        for chunk in plan.chunks:
            seq = chunk.seq
            is_decode = seq.first_token_sent and chunk.num_samples == chunk.num_tokens
            if is_decode and len(chunk.choices) == 1 == len(seq.choices):
                self._decoded(chunk, next(tokens), step)  # nearly always
                continue
            chosen: Iterable[tuple[int, Sampled]] = ()
            if chunk.num_samples:
                chosen = zip(chunk.choices, tokens, strict=False)
            if seq.choices is not chunk.choices:  # some have ended while the lane computed them
                chosen = [pair for pair in chosen if pair[0] in seq.choices]
                if not seq.choices:
                    continue
            self._scheduler.commit(chunk, chunk.num_samples)
            if is_decode:
                self.decode_tokens += 1
            else:
                self.prefill_tokens += chunk.num_tokens
            if seq.request.prefill_only:
                pages = self._scheduler.table.pages_of(seq)[: blocks_for(seq.num_computed)]
                step.computed.append(Computed(seq.request.id, seq.num_computed, pages))
            if chunk.num_samples:
                step.outputs += self._sampled(seq, chosen)

    def fork(self, seq: Sequence, token_ids: Mapping[int, list[int]]) -> None:
        """Goes on with the choices in `token_ids`, which has the next tokens of each; the others have ended.

        The first one takes over `seq`, which is running and computed to its end; the others fork off.
        """
        if not token_ids:
            pages = self._close(seq)
            if seq.request.prefill_only:
                self.shown_pages += pages
            else:
                self._release(seq, pages)
            return
        own, *others = token_ids
        for choice in others:
            self._seqs[seq.request.id].append(self._scheduler.fork(seq, choice, token_ids[choice]))
        seq.choices = [own]
        self._scheduler.append(seq, token_ids[own])

    def finish_of(self, request: Request, num_tokens: int, token_id: int) -> Finish | None:
        """Why a choice ends with this token, the last one of `num_tokens` (prompt included); None: it goes on."""
        if token_id in request.params.stop_token_ids:
            return Finish.STOP
        if num_tokens - request.prompt_len >= request.params.max_tokens or num_tokens >= self._max_model_len:
            return Finish.LENGTH
        return None

    def extended(self, seq: Sequence, token_ids: list[int]) -> Output:
        """A decoding sequence has got tokens in several steps at once."""
        self.decode_tokens += len(token_ids)
        finish = self.finish_of(seq.request, seq.num_tokens, token_ids[-1])
        output = Output(seq.request.id, seq.choices[0], token_ids, [], finish)
        if finish is not None:
            self.fork(seq, {})
        return output

    def _decoded(self, chunk: Chunk, sampled: Sampled, step: StepOutput) -> None:
        """The next token of a sequence with one choice, which is not its first one."""
        seq, token_id = chunk.seq, sampled.token_id
        request = seq.request
        self._scheduler.commit(chunk, 1)
        self.decode_tokens += 1
        finish = self.finish_of(request, seq.num_tokens + 1, token_id)
        logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
        tokens = [token_id]
        step.outputs.append(Output(request.id, seq.choices[0], tokens, logprobs, finish))
        if finish is None:
            self._scheduler.append(seq, tokens)
        else:
            self.fork(seq, {})

    def _sampled(self, seq: Sequence, chosen: Iterable[tuple[int, Sampled]]) -> list[Output]:
        """Appends the next token of each choice of a sequence, or ends it."""
        request, outputs = seq.request, []
        cached, queued_s = (None, 0.0) if seq.first_token_sent else (seq.cached_tokens, seq.queued_s)
        for choice, sampled in chosen:
            finish = self.finish_of(request, seq.num_tokens + 1, sampled.token_id)
            logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
            outputs.append(Output(request.id, choice, [sampled.token_id], logprobs, finish, cached, queued_s))
        seq.first_token_sent = True
        going_on = [] if request.prefill_only else [output for output in outputs if output.finish is None]
        self.fork(seq, {output.choice: output.token_ids for output in going_on})
        return outputs

    def _close(self, seq: Sequence) -> list[int]:
        """Takes a sequence out. Returns its pages, which are the caller's to release."""
        seq.choices = []
        siblings = self._seqs[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._seqs[seq.request.id]
        return self._scheduler.finish(seq)
