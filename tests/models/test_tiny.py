from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.model.config import load_config
from models.tiny import CHECKPOINT
from models.tiny.data.dialogue import said
from models.tiny.make import write
from models.tiny.tokenizer import prompt


def test_it_stays_small_enough_for_the_repository() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 12_000_000


def test_it_has_the_context_that_it_was_trained_for() -> None:
    assert load_config(CHECKPOINT).max_model_len == 4096


def test_its_tokenizer_gives_any_text_back() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = "Grüße, 世界 🌍! <|not special|> \n\t 1234"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_digit_is_a_token() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert tokenizer.encode("is 4817.").tokens == ["is", "Ġ", "4", "8", "1", "7", "."]


def test_every_letter_of_a_quoted_word_is_a_token() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert tokenizer.encode('The "new" lamp').tokens == ["The", 'Ġ"', "n", "e", "w", '"', "Ġlamp"]


def test_its_chat_template_writes_what_training_wrote() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    messages = [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello!"), said("user", "Bye")]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == prompt(messages)
    assert prompt(messages[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_random_weights_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name
