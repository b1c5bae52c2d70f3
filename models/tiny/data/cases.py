"""Evaluation cases: dialogues that end with a question, with the right answer. Training never sees them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from random import Random

from models.tiny.data import requests
from models.tiny.data.dialogue import Message, asked, informed, request
from models.tiny.data.recall import Fact, facts
from models.tiny.data.reserved import is_reserved

MOST_TURNS = 4
TURN_TOKENS = 6
"""Most tokens that the chat template adds to a message."""

UNSEEN = (
    "Can you recommend a good restaurant?", "What is quantum entanglement?", "Sing me a lullaby.",
    "Compose a haiku about the sea.", "Which stocks should I buy?", "My computer is slow, what can I do?",
    "How tall is Mount Everest?", "Debug this function for me.", "Do you have feelings?", "How far away is the moon?",
    "Is it going to snow?", "Who wrote Hamlet?", "Fix the grammar of my essay.", "When was the French revolution?",
    "I feel sad today.", "Give me a workout for my back.", "Why do cats purr?", "Explain how a bill becomes law.",
    "Play some jazz.", "Book me a flight to Madrid.",
)  # fmt: skip
"""Requests the model can't handle, with words that no training dialogue has."""


@dataclass(frozen=True)
class Case:
    """A dialogue that ends with the user's turn, and the one right answer."""

    messages: tuple[Message, ...]
    answer: str


def recall_case(rng: Random, least: int, most: int, length: Callable[[str], int]) -> Case:
    """A question about a reserved fact, in a dialogue of `least` to `most` tokens.

    Long dialogues have at least 20 other facts, and some have further questions before.

    Args:
        rng: Random generator.
        least: Fewest tokens, including those of the chat template.
        most: Most tokens, likewise.
        length: Returns the length of a text in tokens.
    """
    while True:
        room = rng.randint(least, most) - min(most // 2, 100)
        count = rng.randint(min(21, room // 14), room // 14) if room >= 14 else 1
        known = facts(rng, count, with_reserved=True)
        reserved = [fact for fact in known if is_reserved(fact.statement)]
        if len(known) < min(count, 21) or not reserved:
            continue
        context = informed(rng, known, room, length)
        messages = context[:-1] if context[-1]["role"] == "user" else context
        turns = rng.randrange(min(MOST_TURNS, len(reserved)))
        seen: list[Fact] = []
        for fact, (question, answer) in islice(asked(rng, context, reserved), 2 * MOST_TURNS):
            messages = [*messages, question]
            if len(seen) >= turns and fact not in seen:
                if least <= sum(length(message["content"]) + TURN_TOKENS for message in messages) <= most:
                    return Case(tuple(messages), answer["content"])
                break
            messages.append(answer)
            seen.append(fact)


def request_case(rng: Random, kind: requests.Kind) -> Case:
    """A simple request of this kind."""
    _, (question, answer) = request(rng, kind, reserved=True)
    return Case((question,), answer["content"])
