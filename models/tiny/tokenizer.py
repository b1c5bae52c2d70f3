"""The bundled model's tokenizer: byte-level BPE, trained on dialogues.

Every digit is a token, and so is every letter of a lower-case word after a quotation mark: as one token the word would
differ from the one after a space, and the model would have to learn its spelling again.
"""

from collections.abc import Sequence
from random import Random

from tokenizers import Regex, Tokenizer, pre_tokenizers

from models.tiny.data.dialogue import Message, texts
from models.tiny.make import TURN_END, TURN_START, VOCAB_SIZE, train_bpe

TEXTS = 60_000

QUOTED_LETTER = r'(?<=")[a-z]|\G(?<=[a-z])[a-z]'
"""A letter after a quotation mark, or (\\G) after the letter found last."""


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains the tokenizer on dialogues. Equal seeds give equal tokenizers."""
    splits = [
        pre_tokenizers.Split(Regex(QUOTED_LETTER), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
    ]
    return train_bpe(texts(Random(f"tokenizer {seed}"), TEXTS), VOCAB_SIZE, splits, min_frequency=20)


def prompt(messages: Sequence[Message]) -> str:
    """The messages in the chat template's form, up to the start of the assistant's answer."""
    return "".join(part for message in messages for part in rendered(message)) + f"{TURN_START}assistant\n"


def rendered(message: Message) -> tuple[str, str]:
    """A message in the chat template's form, in two parts: before the content, and from the content on."""
    return f"{TURN_START}{message['role']}\n", f"{message['content']}{TURN_END}\n"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token in the vocabulary."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found
