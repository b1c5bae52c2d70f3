"""Prompts and conversations from a file.

Either JSON Lines, or one JSON list of the same objects. An object is one session and has

- `prompt` (text) or `messages` (a chat that ends with the user), with `output_len` or `max_tokens` if it says so, or
- `conversations`, as ShareGPT has them: what the human said are the turns, what the model answered tells, with a
  tokenizer, how many tokens are wanted back; the answers that the conversation carries are the server's own.

Every session begins with the same few words that only this run has, so that a warm cache of another run does not
help, while sessions share among themselves what they share in the file.
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


class _Message(BaseModel):
    role: str
    content: str


class _Chat(_Request):
    messages: Annotated[list[_Message], Field(min_length=1)]


class _Said(BaseModel):
    by: Annotated[str, Field(validation_alias="from")]
    value: str


class _Conversation(BaseModel):
    conversations: list[_Said]


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A turn of the file: what the user says, and how long the answer was or what it was, if the file says."""

    text: str
    answer: int | str | None


@dataclass(frozen=True, slots=True)
class _Talk:
    opening: tuple[Message, ...]
    turns: tuple[_Spoken, ...]


class PromptFile(Workload):
    """The sessions of a file, in its order.

    Args:
        path: The file. It is read once, here.
        output_len: Output tokens where neither the file nor a tokenizer tells.

    Raises:
        BenchError: It cannot be read, or an entry of it is none of the above.
    """

    def __init__(self, path: Path, texts: Texts, seed: int, output_len: Distribution) -> None:
        self._count = texts.count
        self._seed = seed
        self._output_len = output_len
        self._salt = texts.text(generator(seed, Stream.SALT), _SALT_TOKENS)
        self._talks = [talk for where, entry in _entries(path) if (talk := _talk(where, entry)).turns]
        if not self._talks:
            raise BenchError(f"{path} has no prompts")

    @property
    def size(self) -> int:
        return len(self._talks)

    def session(self, index: int) -> Session:
        talk = self._talks[index]
        rng = generator(self._seed, Stream.SESSION, index)

        def output_len(answer: int | str | None) -> int:
            if isinstance(answer, str):
                answer = max(1, self._count(answer)) if self._count else None
            return answer or self._output_len.tokens(rng)

        turns = [Turn(turn.text, 0, output_len(turn.answer)) for turn in talk.turns]
        if talk.opening:
            first, *others = talk.opening
            return Session(index, turns, (replace(first, content=self._salted(first.content)), *others))
        return Session(index, [replace(turns[0], text=self._salted(turns[0].text)), *turns[1:]])

    def _salted(self, text: str) -> str:
        return f"{self._salt}\n\n{text}"


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    data = read(path)
    if not data.lstrip().startswith(b"["):
        return lines(path, data)
    return ((f"{path}: entry {number}", entry) for number, entry in enumerate(parse(str(path), data), 1))


def _talk(where: str, entry: Any) -> _Talk:
    """An entry of the file. A conversation in which nobody asked anything has no turns."""
    match entry:
        case {"conversations": _}:
            return _shared(validate(where, _Conversation, entry))
        case {"messages": _}:
            chat = validate(where, _Chat, entry)
            *opening, last = (Message(message.role, message.content) for message in chat.messages)
            if last.role != "user" or not last.content:
                raise BenchError(f"{where}: the last message is not one of the user")
            return _Talk(tuple(opening), (_Spoken(last.content, chat.output_len),))
        case {"prompt": _}:
            prompt = validate(where, _Prompt, entry)
            return _Talk((), (_Spoken(prompt.prompt, prompt.output_len),))
        case _:
            raise BenchError(f"{where}: not an object with a prompt, with messages or with conversations")


def _shared(conversation: _Conversation) -> _Talk:
    opening: list[Message] = []
    turns: list[_Spoken] = []
    for said in conversation.conversations:
        if said.by in _HUMAN:
            if said.value.strip():
                turns.append(_Spoken(said.value, None))
        elif said.by == "system":
            if not turns:
                opening.append(Message("system", said.value))
        elif turns and turns[-1].answer is None:
            turns[-1] = replace(turns[-1], answer=said.value)
    return _Talk(tuple(opening), tuple(turns))
