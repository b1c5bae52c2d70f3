"""Small tokenizers of the kinds that models have, trained on the load generator's own words."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TEXT = [(Path(__file__).parents[2] / "bench" / "words.txt").read_text()] * 3


def write(directory: Path, tokenizer: Tokenizer) -> Path:
    """Saves the tokenizer as tokenizer.json and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def sentencepiece() -> Tokenizer:
    """A tokenizer like Llama 2's: no splitting before BPE; ▁ stands for a space and is put before the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    unsplit = Tokenizer(tokenizer.model)
    unsplit.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return unsplit


def unigram() -> Tokenizer:
    """A tokenizer like T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=700, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def characters() -> Tokenizer:
    """A tokenizer with bytes only: no word is a single token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), vocab_size=256, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    return tokenizer
