"""Makes whole dialogues, turn by turn."""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from models.tiny.data import requests
from models.tiny.data.recall import Fact, facts, filler, questions, stated
from models.tiny.data.reserved import is_reserved

Message = dict[str, str]
"""`role` and `content`, as in the chat completions API."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a tiny demo model.", "Answer in one sentence.", "Be brief.",
    "You are CPD's demo model. Be kind and brief.", "Answer the user's questions.",
)  # fmt: skip
NOTED = "I will remember that."


def said(role: str, content: str) -> Message:
    """A message."""
    return {"role": role, "content": content}


def exchange(question: str, answer: str) -> list[Message]:
    """The user's question and the assistant's answer."""
    return [said("user", question), said("assistant", answer)]


def request(
    rng: Random, kind: requests.Kind | None = None, reserved: bool = False, late: bool = False
) -> tuple[requests.Kind, list[Message]]:
    """A simple request and its answer.

    Args:
        rng: Random generator.
        kind: Kind of request; None takes a random one.
        reserved: Take one reserved for evaluation instead of one for training.
        late: Use the frequencies of late training.
    """
    shares = [each.share * (each.late if late else 1.0) for each in requests.KINDS]
    while True:
        chosen = kind or rng.choices(requests.KINDS, shares)[0]
        question, answer = chosen.make(rng)
        if not chosen.is_open or is_reserved(question) == reserved:
            return chosen, exchange(question, answer)


def small_talk(rng: Random, late: bool = False) -> Iterator[Message]:
    """An endless dialogue of simple requests; `late` in training some kinds are more frequent."""
    if rng.random() < 0.25:
        yield said("system", rng.choice(SYSTEM_PROMPTS))
    while True:
        yield from request(rng, late=late)[1]


def prose(rng: Random, known: list[Fact], room: int, length: Callable[[str], int]) -> str:
    """The facts in random order among filler sentences, about `room` tokens in all."""
    sentences = [stated(rng, fact) for fact in known]
    left = room - sum(map(length, sentences))
    while left > 0:
        sentences.append(filler(rng))
        left -= length(sentences[-1])
    rng.shuffle(sentences)
    gap = "\n" if rng.random() < 0.2 else " "
    return gap.join(sentences)


def informed(rng: Random, known: list[Fact], room: int, length: Callable[[str], int]) -> list[Message]:
    """The beginning of a dialogue, about `room` tokens, which states the facts.

    They are in the system's message, in the user's first message, or in a message each. If the last message is the
    user's, a question must be appended to it.
    """
    way = rng.random()
    if way < 0.12 and len(known) <= 12:
        return [message for fact in known for message in exchange(stated(rng, fact), NOTED)]
    text = prose(rng, known, room, length)
    if way < 0.35:
        return [said("system", text)]
    opening = [said("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.2 else []
    if way < 0.5:
        return [*opening, *exchange(text, NOTED)]
    return [*opening, said("user", text)]


def asked(rng: Random, context: list[Message], known: list[Fact]) -> Iterator[tuple[Fact, list[Message]]]:
    """Endless questions about the facts with their answers. The first one continues `context` if its last message is
    the user's."""
    unfinished = context[-1]["content"] if context[-1]["role"] == "user" else ""
    for question, fact in questions(rng, known):
        if unfinished:
            question = f"{unfinished}{rng.choice((' ', chr(10), chr(10) * 2))}{question}"
            unfinished = ""
        yield fact, exchange(question, fact.statement)


def recall(rng: Random, tokens: int, length: Callable[[str], int]) -> Iterator[Message]:
    """An endless dialogue: facts in a context, then questions about them.

    Args:
        rng: Random generator.
        tokens: Length of the whole sequence; the context leaves a part of it for questions.
        length: Returns the length of a text in tokens.
    """
    room = int(tokens * rng.choice((0.4, 0.6, 0.75, 0.85))) if tokens > 100 else tokens // 3
    most = max(1, room // 14)
    count = max(1, int(most * rng.choice((0.1, 0.25, 0.5, 0.75, 1.0))))
    known: list[Fact] = []
    while not known:
        known = facts(rng, count)
    context = informed(rng, known, room, length)
    yield from (message for message in context if message is not context[-1] or message["role"] != "user")
    for _, messages in asked(rng, context, known):
        yield from messages
        if rng.random() < 0.04:
            yield from request(rng)[1]


def texts(rng: Random, count: int) -> Iterator[str]:
    """About `count` messages of all kinds to train a tokenizer on."""
    for _ in range(count // 8):
        yield from (message["content"] for message in islice(small_talk(rng), 6))
        yield from (message["content"] for message in islice(recall(rng, 256, lambda text: len(text) // 4), 4))
