"""The live requests: the sequences of each, and what newly chosen tokens make of them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, islice

import numpy as np

from cpd.blocks import BLOCK_SIZE, blocks_for
from engine.batch import Sampled
from engine.live import LiveSequences
from engine.plan import Chunk, Plan
from engine.sequence import Seq
from engine.types import Computed, Finish, Output, Request, StepOutput

MOST_UNANSWERED = 1024
"""Named at a time."""


class LiveRequests:
    """Knows every sequence that has not finished.

    Args:
        release: Takes the pages that a finished sequence leaves.

    Attributes:
        prefill_tokens: Computed in chunks so far; after a preemption some a second time.
        decode_tokens: Computed one a step so far, after a choice's first output.
    """

    def __init__(self, live: LiveSequences, max_model_len: int, release: Callable[[list[int]], None]) -> None:
        self._live = live
        self._release = release
        self._max_model_len = max_model_len
        self._seqs: dict[str, list[Seq]] = {}
        self._arrivals = count()
        self._shown: list[int] = []
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def seqs(self) -> list[Seq]:
        """Those of all requests."""
        return [seq for seqs in self._seqs.values() for seq in seqs]

    def unanswered(self) -> list[int]:
        """Routers' numbers of the newest requests that have no token yet."""
        newest = islice(reversed(self._seqs.values()), MOST_UNANSWERED)
        return [seqs[0].request.number for seqs in newest if not seqs[0].reported]

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

    def open(self, request: Request, choices: list[int]) -> Seq:
        """A new sequence for all these choices."""
        seq = Seq(
            request=request,
            choices=choices,
            order=(next(self._arrivals), request.first_choice),
            hashes=list(request.block_hashes),
            tokens=np.array(request.token_ids, dtype=np.int32),
            num_tokens=len(request.token_ids),
        )
        self._seqs.setdefault(request.id, []).append(seq)
        return seq

    def end_choices(self, request_id: str, choices: Collection[int] | None) -> None:
        """Takes these choices out (None: all); those that the request has not are ignored."""
        for seq in tuple(self._seqs.get(request_id, ())):
            seq.choices = [] if choices is None else [choice for choice in seq.choices if choice not in choices]
            if not seq.choices:
                self._release(self._close(seq))

    def process(self, plan: Plan, sampled: Sequence[Sampled], step: StepOutput) -> None:
        """A lane has computed a plan.

        Args:
            sampled: In the order of the batch's samples.
            step: Takes what that brought.
        """
        tokens = iter(sampled)
        for chunk in plan.chunks:
            seq = chunk.seq
            if chunk.count == 1 and chunk.samples and seq.reported and len(chunk.choices) == 1 == len(seq.choices):
                self._next(chunk, next(tokens), step)  # nearly always
                continue
            chosen: Iterable[tuple[int, Sampled]] = zip(chunk.choices, tokens, strict=False) if chunk.samples else ()
            if seq.choices is not chunk.choices:  # some have ended while the lane computed them
                chosen = [pair for pair in chosen if pair[0] in seq.choices]
                if not seq.choices:
                    continue
            self._live.advance(chunk)
            if seq.reported and chunk.count == 1:
                self.decode_tokens += 1
            else:
                self.prefill_tokens += chunk.count
            if seq.request.prefill_only:
                pages = self._live.table.pages_of(seq)[: blocks_for(seq.num_computed)]
                step.computed.append(Computed(seq.request.id, seq.num_computed, pages))
            if chunk.samples:
                step.outputs += self._continue(seq, chosen)

    def branch(self, seq: Seq, token_ids: Mapping[int, Sequence[int]]) -> None:
        """Goes on with the choices that are in `token_ids`, which has the next tokens of each.

        The first one takes over `seq`, which is running and computed to its end; the others fork off.
        """
        if not token_ids:
            pages = self._close(seq)
            if seq.request.prefill_only:
                self._shown += pages
            else:
                self._release(pages)
            return
        own, *others = token_ids
        for choice in others:
            self._seqs[seq.request.id].append(self._live.fork(seq, choice, token_ids[choice]))
        seq.choices = [own]
        for token_id in token_ids[own]:
            self._live.table.add_token(seq, token_id)

    def finish_of(self, request: Request, num_tokens: int, token_id: int) -> Finish | None:
        """Whether a choice ends with this token, its number `num_tokens` (prompt included)."""
        if token_id in request.params.stop_token_ids:
            return Finish.STOP
        if num_tokens - request.prompt_len >= request.params.max_tokens or num_tokens >= self._max_model_len:
            return Finish.LENGTH
        return None

    @property
    def shown(self) -> list[int]:
        """Pages of finished prefill-only requests, held until the caller had the chance to pin them."""
        return self._shown

    def release_shown(self) -> None:
        """The caller had its chance."""
        self._live.pool.release(self._shown)
        self._shown = []

    def _next(self, chunk: Chunk, sampled: Sampled, step: StepOutput) -> None:
        """The next token of a sequence with one choice, which is not its first one."""
        seq, token_id = chunk.seq, sampled.token_id
        request = seq.request
        self._live.advance(chunk)
        self.decode_tokens += 1
        finish = self.finish_of(request, seq.num_tokens + 1, token_id)
        logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
        step.outputs.append(Output(request.id, seq.choices[0], [token_id], logprobs, finish))
        if finish is None:
            self._live.table.add_token(seq, token_id)
        else:
            self.branch(seq, {})

    def _continue(self, seq: Seq, chosen: Iterable[tuple[int, Sampled]]) -> list[Output]:
        """Appends the next token of each choice of a sequence, or ends it."""
        request, outputs = seq.request, []
        cached, queued_s = (None, 0.0) if seq.reported else (seq.cached_tokens, seq.queued_s)
        for choice, sampled in chosen:
            finish = self.finish_of(request, seq.num_tokens + 1, sampled.token_id)
            logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
            outputs.append(Output(request.id, choice, [sampled.token_id], logprobs, finish, cached, queued_s))
        seq.reported = True
        going_on = [] if request.prefill_only else [output for output in outputs if output.finish is None]
        self.branch(seq, {output.choice: output.token_ids for output in going_on})
        return outputs

    def _close(self, seq: Seq) -> list[int]:
        """Takes a sequence out. Returns its pages, which are the caller's to release."""
        seq.choices = []
        siblings = self._seqs[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._seqs[seq.request.id]
        return self._live.finish(seq)
