"""Prompts and conversations from a file of JSON Lines, or of one JSON list of the same objects.

An object is one session and has

- `prompt` (text) or `messages` (a chat that ends with the user), optionally with `output_len` or `max_tokens`, or
- `conversations`, as in ShareGPT: the human's messages are the turns. With a tokenizer, the model's answers give the
  number of output tokens; the conversation continues with the server's own answers.

Every session begins with the same few words that are unique to the run, so that a warm cache of another run does not
help, while sessions still share the prefixes that they share in the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field

from bench.errors import BenchError
from bench.tokens import Texts
from bench.workloads.base import Message, Session, Turn, Workload
from bench.workloads.lengths import Distribution
from bench.workloads.randomness import Stream, generator
from bench.workloads.reading import lines, parse, read, validate

_SALT_TOKENS = 16
_HUMAN = ("human", "user")

_Text = Annotated[str, Field(min_length=1)]


class _Request(BaseModel):
    output_len: Annotated[int | None, Field(ge=1, validation_alias=AliasChoices("output_len", "max_tokens"))] = None


class _Prompt(_Request):
    prompt: _Text


class _Chat(_Request):
    messages: Annotated[list[Message], Field(min_length=1)]


class _ShareGptMessage(BaseModel):
    by: Annotated[str, Field(validation_alias="from")]
    value: str


class _ShareGptConversation(BaseModel):
    conversations: list[_ShareGptMessage]


@dataclass(frozen=True, slots=True)
class _FileTurn:
    """A turn of the file: the user's text, and the answer or its length, if the file has it."""

    text: str
    answer: int | str | None


@dataclass(frozen=True, slots=True)
class _FileSession:
    opening: tuple[Message, ...]
    turns: tuple[_FileTurn, ...]


class PromptFile(Workload):
    """The sessions of a file in its order.

    Args:
        path: The file, which is read once, here.
        texts: Counts tokens, and makes the words that are unique to the run.
        seed: Seed of the run.
        output_len: Output tokens where neither the file nor a tokenizer tells.

    Raises:
        BenchError: The file cannot be read, or an entry has another form.
    """

    def __init__(self, path: Path, texts: Texts, seed: int, output_len: Distribution) -> None:
        self._count = texts.count
        self._seed = seed
        self._output_len = output_len
        self._salt = texts.text(generator(seed, Stream.SALT), _SALT_TOKENS)
        self._sessions = [session for where, entry in _entries(path) if (session := _session(where, entry)).turns]
        if not self._sessions:
            raise BenchError(f"{path} has no prompts")

    @property
    def size(self) -> int:
        return len(self._sessions)

    def session(self, index: int) -> Session:
        session = self._sessions[index]
        rng = generator(self._seed, Stream.SESSION, index)

        def output_len(answer: int | str | None) -> int:
            if isinstance(answer, str):
                answer = max(1, self._count(answer)) if self._count else None
            return answer or self._output_len.tokens(rng)

        turns = [Turn(turn.text, 0, output_len(turn.answer)) for turn in session.turns]
        if session.opening:
            first, *others = session.opening
            return Session(index, turns, (replace(first, content=self._salted(first.content)), *others))
        return Session(index, [replace(turns[0], text=self._salted(turns[0].text)), *turns[1:]])

    def _salted(self, text: str) -> str:
        return f"{self._salt}\n\n{text}"


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    data = read(path)
    if not data.lstrip().startswith(b"["):
        return lines(path, data)
    return ((f"{path}: entry {number}", entry) for number, entry in enumerate(parse(str(path), data), 1))


def _session(where: str, entry: Any) -> _FileSession:
    """Parses an entry of the file. A conversation without questions has no turns."""
    match entry:
        case {"conversations": _}:
            return _shared(validate(where, _ShareGptConversation, entry))
        case {"messages": _}:
            chat = validate(where, _Chat, entry)
            *opening, last = chat.messages
            if last.role != "user" or not last.content:
                raise BenchError(f"{where}: the last message is not the user's")
            return _FileSession(tuple(opening), (_FileTurn(last.content, chat.output_len),))
        case {"prompt": _}:
            prompt = validate(where, _Prompt, entry)
            return _FileSession((), (_FileTurn(prompt.prompt, prompt.output_len),))
        case _:
            raise BenchError(f"{where}: not an object with a prompt, with messages or with conversations")


def _shared(conversation: _ShareGptConversation) -> _FileSession:
    opening: list[Message] = []
    turns: list[_FileTurn] = []
    for said in conversation.conversations:
        if said.by in _HUMAN:
            if said.value.strip():
                turns.append(_FileTurn(said.value, None))
        elif said.by == "system":
            if not turns:
                opening.append(Message("system", said.value))
        elif turns and turns[-1].answer is None:
            turns[-1] = replace(turns[-1], answer=said.value)
    return _FileSession(tuple(opening), tuple(turns))
