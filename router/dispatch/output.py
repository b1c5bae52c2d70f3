"""The text of one choice, which grows as tokens arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpd.rpc import cpd_pb2 as pb
from router.text.detokenize import Detokenizer
from router.text.stops import StopMatcher

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of the text with its log-probabilities.

    Attributes:
        offset: Start of the token in the choice's text, in characters.
        top: The most likely tokens with their log-probabilities.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(slots=True)
class Delta:
    """New output of a choice since the last delta.

    Attributes:
        pieces: The text, one piece per token that added some.
    """

    pieces: list[str]
    token_ids: list[int]
    scores: list[TokenScore]

    @property
    def text(self) -> str:
        """The text in one piece."""
        return "".join(self.pieces)


class Choice:
    """Turns the tokens of one choice into deltas of text.

    The token or string that ends the choice counts, but gives no text unless `include_stop`. Scores are released
    together with their text.

    Args:
        index: The choice's index in the response.
        detokenizer: A detokenizer for this choice alone.
        stops: Stop strings.
        min_tokens: Stop strings are ignored before this many tokens.
        include_stop: What ends the choice is part of its text. Special tokens such as EOS have none.

    Attributes:
        num_tokens: Tokens so far.
        last_at: Loop time of the last tokens, set by the dispatcher.
        finish: Reason why the choice ended; None while it runs.
    """

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, include_stop: bool = False
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.last_at = 0.0
        self.finish: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include=include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._seen = 0  # characters detokenised
        self._released = 0  # characters of text put into pieces

    def push(self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], finish: int) -> None:
        """Adds tokens. Sets `finish` if the choice ends, by the argument `finish` or by a stop string."""
        hides_last = finish == pb.FINISH_STOP and not self._include_stop
        text_tokens = token_ids[:-1] if hides_last else token_ids
        if self._stops is None and not logprobs:  # nearly always: nothing to look at token by token
            self.num_tokens += len(text_tokens)
            self._token_ids += text_tokens
            self._pieces += filter(None, map(self._detokenizer.push, text_tokens))
        else:
            for position, token_id in enumerate(text_tokens):
                self.num_tokens += 1
                self._token_ids.append(token_id)
                if logprobs:
                    scored = logprobs[position]
                    top = tuple(zip(scored.top_ids, scored.top_logprobs, strict=True))
                    self._scores.append(TokenScore(token_id, scored.logprob, top, self._seen))
                self._release(self._detokenizer.push(token_id))
                if self.finish is not None:
                    return
        if hides_last:
            self.num_tokens += 1
            self._token_ids.append(token_ids[-1])
        if finish != pb.FINISH_NONE:
            self._release(self._detokenizer.flush())
            if self.finish is None:
                self._let_through(self._stops.flush() if self._stops is not None else "")
                self.finish = "stop" if finish == pb.FINISH_STOP else "length"

    @property
    def has_delta(self) -> bool:
        """True if there is new text, or the choice has ended."""
        return bool(self._pieces) or self.finish is not None

    def take(self) -> Delta:
        """Returns the output since the last call."""
        ready = len(self._scores)
        if self.finish is None or self._stopped_by_string:
            while ready and self._scores[ready - 1].offset >= self._released:
                ready -= 1
        delta = Delta(self._pieces, self._token_ids, self._scores[:ready])
        self._pieces, self._token_ids, self._scores = [], [], self._scores[ready:]
        return delta

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._stops.found or None if self._stops is not None else None

    @property
    def _stopped_by_string(self) -> bool:
        return self._stops is not None and self._stops.matched

    def _release(self, piece: str) -> None:
        if not piece:
            return
        self._seen += len(piece)
        if self._stops is None or self.num_tokens < self._min_tokens:
            self._let_through(piece)
            return
        self._let_through(self._stops.push(piece))
        if self._stops.matched:
            self.finish = "stop"

    def _let_through(self, text: str) -> None:
        if text:
            self._pieces.append(text)
        self._released += len(text)
