from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.tiny import CHECKPOINT
from models.tiny.make import write


def test_the_committed_weights_are_what_the_script_writes(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes(), name


def test_it_stays_small_enough_for_the_repository() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 2 << 20


def test_its_tokenizer_gives_any_text_back() -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = "Grüße, 世界 🌍! <|not special|> \n\t 1234"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_its_chat_template_ends_with_the_assistants_turn() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
