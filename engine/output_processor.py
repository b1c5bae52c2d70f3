"""Checks and opens requests, and turns sampled tokens into outputs: finish reasons, forks, prefill-only progress.

An output that must follow a grammar goes on only with tokens that its constraint accepts; else its request fails.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import count, islice
from types import MappingProxyType

import numpy as np

from cpd.common.blocks import BLOCK_SIZE, blocks_for
from cpd.grammar.constraint import TokenConstraint
from engine.batch import Sampled
from engine.scheduling.plan import MAX_DECODE_TOKENS, Plan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.types import Computed, Finish, Output, Request, StepOutput, TokenLogprobs

MAX_AWAITING = 1024
"""Maximum number of requests that `awaiting_first_token` returns."""


class OutputProcessor:
    """Checks and opens requests, and makes their outputs. Knows the sequences of every unfinished request.

    Args:
        release: Takes the pages that a finished sequence leaves.

    Attributes:
        prefill_tokens: Total of tokens computed by prefills. After a preemption, some count twice.
        decode_tokens: Total of tokens that decodes returned; the first token of a choice comes from a prefill.
        pages_to_release: Pages of finished prefill-only requests, held until the caller has had the chance to pin them.
    """

    def __init__(self, scheduler: Scheduler, release: Callable[[Sequence, list[int]], None]) -> None:
        self._scheduler = scheduler
        self._release = release
        self._max_model_len = scheduler.table.max_len
        self._seqs: dict[str, list[Sequence]] = {}
        self._arrivals = count()
        self.pages_to_release: list[int] = []
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def seqs(self) -> list[Sequence]:
        """The sequences of all requests."""
        return [seq for seqs in self._seqs.values() for seq in seqs]

    def seqs_of(self, request_id: str) -> list[Sequence]:
        """The sequences of one request; none if it is unknown."""
        return list(self._seqs.get(request_id, ()))

    def awaiting_first_token(self) -> list[int]:
        """The `Request.number` of the newest requests without a token, newest first."""
        newest = islice(reversed(self._seqs.values()), MAX_AWAITING)
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
        if request.params.grammar is not None and request.constraint is None:
            raise ValueError("its output must follow a grammar, which this worker can't enforce")

    def open(self, request: Request, choices: list[int]) -> Sequence:
        """Makes a sequence for all these choices.

        Raises:
            ValueError: The output so far does not follow the request's grammar.
        """
        constraint = self.constraint_after(request)
        seq = Sequence(
            request=request,
            choices=choices,
            order=(next(self._arrivals), request.first_choice),
            hashes=list(request.block_hashes),
            tokens=np.array(request.token_ids, dtype=np.int32),
            num_tokens=len(request.token_ids),
            constraint=constraint,
        )
        self._seqs.setdefault(request.id, []).append(seq)
        return seq

    def constraint_after(self, request: Request) -> TokenConstraint | None:
        """Returns a request's constraint after the output that was already emitted; None if there is nothing to follow.

        Raises:
            ValueError: That output does not follow the grammar.
        """
        if request.constraint is None:
            return None
        constraint = request.constraint.fork(min(request.params.max_tokens, self._max_model_len - request.prompt_len))
        if not all(map(constraint.accept, request.token_ids[request.prompt_len :])):
            raise ValueError(f"the output so far does not follow its grammar: {constraint.error}")
        return constraint

    def end_choices(self, request_id: str, choices: Collection[int] | None = None) -> None:
        """Ends these choices (None: all). Choices that the request does not have are ignored."""
        for seq in tuple(self._seqs.get(request_id, ())):
            seq.choices = [] if choices is None else [choice for choice in seq.choices if choice not in choices]
            if not seq.choices:
                self._release(seq, self._close(seq))

    def process(self, plan: Plan, sampled: list[Sampled], step: StepOutput) -> None:
        """Processes a plan that a lane has computed.

        Args:
            sampled: The sampled tokens, in the order of the batch's samples.
            step: The outputs are added to it.
        """
        end = 0
        for chunk in plan.chunks:
            seq, begin, end = chunk.seq, end, end + chunk.num_samples * len(chunk.choices)
            accepted = sampled[begin:end]
            if not seq.choices:  # they ended while the lane computed them
                continue
            if seq.first_token_sent and chunk.is_decode:
                token_ids = [one.token_id for one in accepted]
                if seq.constraint is not None:
                    token_ids = self._followed(seq, seq.constraint, accepted[0])
                    if seq.constraint.error:
                        self._fail(seq, seq.constraint.error, step)
                        continue
                self._scheduler.append(seq, token_ids)
                self._scheduler.commit(chunk, len(accepted))
                with_logprobs = seq.request.params.top_logprobs is not None
                logprobs = [one.logprobs for one in accepted if one.logprobs] if with_logprobs else []
                step.outputs.append(self.decoded(seq, token_ids, logprobs))
                continue
            self._scheduler.commit(chunk, chunk.num_samples)
            self.prefill_tokens += chunk.num_tokens
            sampled_by = dict(zip(chunk.choices, accepted, strict=True)) if accepted else {}
            first = {choice: one for choice, one in sampled_by.items() if choice in seq.choices}
            token_ids_by, constraints = self._first_tokens(seq, first)
            if error := next((one.error for one in constraints.values() if one.error), ""):
                self._fail(seq, error, step)
                continue
            if seq.request.prefill_only:
                pages = self._scheduler.table.pages_of(seq)[: blocks_for(seq.num_computed)]
                step.computed.append(Computed(seq.request.id, seq.num_computed, pages))
            if accepted:
                step.outputs += self._prefilled(seq, first, token_ids_by, constraints)

    def decoded(self, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> Output:
        """Makes the output for tokens that a decoding sequence has got, and ends the sequence if the last one says so.

        Args:
            token_ids: The sequence's last tokens. Only the last of them may end it.
            logprobs: One for each token if the request asked for them.
        """
        self.decode_tokens += len(token_ids)
        finish = self.finish_of(seq.request, seq.num_tokens, token_ids[-1])
        output = Output(seq.request.id, seq.choices[0], token_ids, logprobs or [], finish)
        if finish is not None:
            self.fork(seq, {})
        return output

    def fork(
        self,
        seq: Sequence,
        token_ids: Mapping[int, list[int]],
        constraints: Mapping[int, TokenConstraint] = MappingProxyType({}),
    ) -> None:
        """Continues the choices in `token_ids`, which has the next tokens of each; the others have ended.

        The first choice takes over `seq`, which is running and computed to its end; the others fork off.

        Args:
            constraints: The constraint of each choice after its tokens, from `advanced`.
        """
        if not token_ids:
            pages = self._close(seq)
            if seq.request.prefill_only:
                self.pages_to_release += pages
            else:
                self._release(seq, pages)
            return
        own, *others = token_ids
        for choice in others:
            child = self._scheduler.fork(seq, choice, token_ids[choice])
            child.constraint = constraints.get(choice)
            self._seqs[seq.request.id].append(child)
        seq.choices = [own]
        seq.constraint = constraints.get(own)
        self._scheduler.append(seq, token_ids[own])

    def finish_of(self, request: Request, num_tokens: int, token_id: int) -> Finish | None:
        """Why a choice ends with this token, the last one of `num_tokens` (prompt included); None if it goes on."""
        if token_id in request.params.stop_token_ids:
            return Finish.STOP
        if num_tokens - request.prompt_len >= request.params.max_tokens or num_tokens >= self._max_model_len:
            return Finish.LENGTH
        return None

    def _first_tokens(
        self, seq: Sequence, first: Mapping[int, Sampled]
    ) -> tuple[dict[int, list[int]], dict[int, TokenConstraint]]:
        """Returns the first tokens of each choice, and its own constraint after them; none of these without a grammar.

        Args:
            first: The sampled token of each choice.
        """
        if seq.constraint is None:
            return {choice: [one.token_id] for choice, one in first.items()}, {}
        constraints = {choice: seq.constraint.fork() if len(first) > 1 else seq.constraint for choice in first}
        return {choice: self._followed(seq, constraints[choice], one) for choice, one in first.items()}, constraints

    def _followed(self, seq: Sequence, constraint: TokenConstraint, one: Sampled) -> list[int]:
        """Returns the tokens that a choice gets when a token was sampled: those that its grammar forces come with it.

        If it has log-probabilities, it gets a single token, since the others' are not computed yet. Then the mask
        forces these. That holds for a prefill, too, whose caller expects a single token.
        """
        request, sampled_id = seq.request, one.token_id
        single = request.prefill_only or request.params.top_logprobs is not None
        token_ids = constraint.advance(sampled_id, 1 if single else MAX_DECODE_TOKENS)
        if token_ids and token_ids[0] != sampled_id and one.replacement is not None:
            one.logprobs = one.replacement
        return token_ids

    def _prefilled(
        self,
        seq: Sequence,
        first: Mapping[int, Sampled],
        token_ids: Mapping[int, list[int]],
        constraints: Mapping[int, TokenConstraint],
    ) -> list[Output]:
        """Makes an output for the first tokens after a prefill of each choice.

        Each choice then goes on in a sequence of its own, or ends.

        Args:
            first, token_ids, constraints: See `_first_tokens`.
        """
        request, outputs = seq.request, []
        cached, queued_s = (None, 0.0) if seq.first_token_sent else (seq.cached_tokens, seq.queued_s)
        for choice, one in first.items():
            own = token_ids[choice]
            finish = self.finish_of(request, seq.num_tokens + len(own), own[-1])
            logprobs = [] if one.logprobs is None else [one.logprobs]
            outputs.append(Output(request.id, choice, own, logprobs, finish, cached, queued_s))
        seq.first_token_sent = True
        going_on = [] if request.prefill_only else [output for output in outputs if output.finish is None]
        self.fork(seq, {output.choice: output.token_ids for output in going_on}, constraints)
        return outputs

    def _fail(self, seq: Sequence, reason: str, step: StepOutput) -> None:
        """Ends all choices of a sequence's request, because it can't be finished."""
        request_id = seq.request.id
        for one in tuple(self._seqs[request_id]):
            self.fork(one, {})
        step.failed.append((request_id, reason))

    def _close(self, seq: Sequence) -> list[int]:
        """Removes a sequence. Returns its pages, which the caller must release."""
        seq.choices = []
        seqs = self._seqs[seq.request.id]
        seqs.remove(seq)
        if not seqs:
            del self._seqs[seq.request.id]
        return self._scheduler.finish(seq)


def advanced(constraint: TokenConstraint | None, token_ids: Mapping[int, list[int]]) -> dict[int, TokenConstraint]:
    """Returns a constraint of its own for each choice, after its tokens; none if there is nothing to follow.

    The caller looks at their `error`, and does not use `constraint` any more.
    """
    if constraint is None:
        return {}
    constraints = {}
    for choice, tokens in token_ids.items():
        own = constraint.fork() if len(token_ids) > 1 else constraint
        all(map(own.accept, tokens))
        constraints[choice] = own
    return constraints
