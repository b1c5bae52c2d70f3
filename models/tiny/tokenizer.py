"""The bundled model's tokenizer: byte-level BPE, trained on dialogues.

A token of their own have every digit, and every letter of a word in lower case that follows a quotation mark: as one
token, it would be another one than after a space, which the model would have to learn to spell anew.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.tiny.data.dialogue import Message, texts
from models.tiny.make import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START

VOCAB_SIZE = 2048
TEXTS = 60_000

QUOTED_LETTER = r'(?<=")[a-z]|\G(?<=[a-z])[a-z]'
"""A letter that follows a quotation mark, or (\\G) the letter that was found last."""


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of at most VOCAB_SIZE tokens, the special ones first. The same for the same seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QUOTED_LETTER), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=20,
        special_tokens=[AddedToken(name, special=True) for name in (END_OF_TEXT, TURN_START, TURN_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(Random(f"tokenizer {seed}"), TEXTS), trainer)
    return tokenizer


def tokenizer_config(context_length: int) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def prompt(messages: Sequence[Message]) -> str:
    """The messages as the chat template writes them, up to where the assistant's answer begins."""
    return "".join(part for message in messages for part in rendered(message)) + f"{TURN_START}assistant\n"


def rendered(message: Message) -> tuple[str, str]:
    """A message as the chat template writes it, in two parts: up to the content, and from there on."""
    return f"{TURN_START}{message['role']}\n", f"{message['content']}{TURN_END}\n"


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found
