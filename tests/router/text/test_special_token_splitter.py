"""Parts of a text, tokenised one by one, give the tokens of the whole: with every kind of tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from router.text.special_token_splitter import cut_pattern

CORPUS = [
    "the quick brown fox  jumps over the lazy dog\n\n1234 naïvely: 你好 🙂 <|im_end|> \uff1cend\uff1e <s> [INST] user\n"
] * 4
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]")
TINY = Path(__file__).parents[3] / "models" / "tiny" / "checkpoint" / "tokenizer.json"


def _trained(tokenizer: Tokenizer, trainer: type, *tokens: AddedToken, **options: object) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=400, show_progress=False, **options))
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _byte_level(*tokens: AddedToken, prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer, *tokens, initial_alphabet=alphabet)


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return _trained(tokenizer, trainers.BpeTrainer, special_tokens=["<unk>"])


def _legacy_llama() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _trained(tokenizer, trainers.BpeTrainer, special_tokens=["<unk>"])


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _trained(tokenizer, trainers.UnigramTrainer, special_tokens=["<unk>"], unk_token="<unk>")


def _wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(tokenizer, trainers.WordPieceTrainer, special_tokens=["[UNK]"])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "the bundled one": lambda: Tokenizer.from_file(str(TINY)),
    "byte-level": _byte_level,
    "byte-level with prefix space": lambda: _byte_level(prefix_space=True),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "legacy Llama": _legacy_llama,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "greedy neighbours": lambda: _byte_level(
        AddedToken("<|im_end|>\n<s>"),
        AddedToken("x</"),
        AddedToken("<|"),
        AddedToken("quick", normalized=True),
        AddedToken("[TAKES]", lstrip=True, rstrip=True),
    ),
}

pieces = st.one_of(
    st.sampled_from(
        [*SPECIAL_TOKENS, "<|", "|>", "x</", "quick", "[TAKES]", "<", "[", "▁", "\uff1cs\uff1e", "<<s>>", "<unk>"]
    ),
    st.sampled_from([" ", "  ", "\n", "user\n", "the quick brown", "1234", "你好", "🙂", "é", "I'm"]),
    st.text(max_size=5),
)


@pytest.fixture(scope="module", params=KINDS)
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@settings(max_examples=150)
@given(st.lists(pieces, max_size=12))
@example(["<s>", "<s>", " "])
@example([" ", "<|im_end|>", "\n", "<s>", " "])
def test_parts_give_the_tokens_of_the_whole(backend: Tokenizer, texts: list[str]) -> None:
    text = "".join(texts)
    pattern = cut_pattern(backend)
    assert pattern is not None
    starts = [match.start() for match in pattern.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True) if start < end]
    ids = [token for part in parts for token in backend.encode(part, add_special_tokens=False).ids]
    assert ids == backend.encode(text, add_special_tokens=False).ids


def test_splits_only_before_special_tokens() -> None:
    pattern = cut_pattern(_byte_level())
    assert pattern is not None
    found = [match.group() for match in pattern.finditer("<s><|im_start|>user<|im_end|>\n<|im_start|> <|x")]
    assert found == ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|im_end|>\n"),  # longer
        AddedToken("x<|im_"),  # begins before
        AddedToken("<|im_end|>", lstrip=True),
        AddedToken("<|im_end|>", normalized=True),
    ],
)
def test_does_not_split_where_another_token_could_begin(token: AddedToken) -> None:
    tokenizer = Tokenizer(models.BPE())
    plain = [AddedToken(content, normalized=False) for content in ("<s>", "<|im_end|>") if content != token.content]
    tokenizer.add_tokens([token, *plain])
    pattern = cut_pattern(tokenizer)
    assert pattern is not None
    assert [match.group() for match in pattern.finditer("a<s>b<|im_end|>\n")] == ["<s>"]


def test_does_not_split_if_the_text_around_a_token_matters() -> None:
    assert cut_pattern(_byte_level(AddedToken("word", single_word=True))) is None
    assert cut_pattern(Tokenizer(models.BPE())) is None
