import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cpd.common.blocks import pack_tokens, unpack_tokens
from models import tiny
from router.text import word_cache
from router.text.tokenizer import Tokenizer as RouterTokenizer
from router.text.word_cache import WordCache, find_cuts

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BUNDLED = Tokenizer.from_file(str(tiny.CHECKPOINT / "tokenizer.json"))
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITTERS = [
    GPT2,
    pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    BUNDLED.pre_tokenizer,
    *(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])
        for pattern in sorted(word_cache._PATTERNS)
    ),
]
PARTS = [  # spaces and newlines twice: they decide where to cut
    "a",
    "the",
    "it's",
    "I'LL",
    " ",
    " ",
    "  ",
    "\n",
    "\0",
    "\1",
    "\n",
    "\r\n",
    "\t",
    "\x1c",
    "\u00a0",
    "\u3000",
    "\u0301",
    ".",
    ",",
    "1",
    "42",
    "é",
    "e\u0301",
    "你",
    "🙂",
    "<|end|>",
    "-",
    '"',
]


def _backend(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Trained so that neighbours are merged wherever the splitter allows it."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the a the a it's I'LL the, a. a\n the 42 é 你 " * 20], trainer)
    return backend


def _cache(backend: Tokenizer) -> WordCache:
    async def encode(texts: Sequence[str], owner: bytes) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    cuts = find_cuts(backend)
    assert cuts is not None
    return WordCache(cuts, encode)


@pytest.mark.parametrize("splitter", SPLITTERS, ids=["gpt-2", "digits", "bundled", "qwen or llama", "llama or qwen"])
def test_tokens_are_those_of_the_whole_text(splitter: pre_tokenizers.PreTokenizer) -> None:
    backend = _backend(splitter)
    backend.add_tokens(["the<", "-'"])
    cache = _cache(backend)

    @settings(deadline=None, max_examples=500)
    @given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join) | st.text())
    def check(text: str) -> None:
        for _ in range(2):  # unknown, then known
            coroutine = cache.encode(text)
            with pytest.raises(StopIteration) as result:
                coroutine.send(None)
            assert result.value.value == pack_tokens(backend.encode(text).ids)

    check()


async def test_a_word_is_encoded_once_unless_it_is_long() -> None:
    encoded: list[str] = []

    async def encode(texts: Sequence[str], owner: bytes) -> list[list[int]]:
        encoded.extend(texts)
        return [[len(text)] for text in texts]

    cache, long = WordCache(word_cache._AFTER_LINES, encode), "x" * 80
    for _ in range(2):
        assert await cache.encode(f"A bc def bc {long} so") == pack_tokens([1, 3, 4, 3, 81, 3])
    assert sorted(encoded) == sorted(["A", " bc", " def", f" {long}", " so", f" {long}"])


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (word_cache._AFTER_LINES, ["a", " b.\n\n", "a\n", "  ", " b\t", " a"]),
        (word_cache._BEFORE_LINES, ["a", " b.\n\na\n   b\t a"]),
    ],
    ids=["after lines", "before lines"],
)
async def test_texts_of_several_lines_are_cut_into_words(cuts: word_cache.Cuts, words: list[str]) -> None:
    encoded: list[str] = []

    async def encode(texts: Sequence[str], owner: bytes) -> list[list[int]]:
        encoded.extend(texts)
        return [[len(text)] for text in texts]

    cache = WordCache(cuts, encode)
    for _ in range(2):
        assert await cache.encode("a b.\n\na\n   b\t a") == pack_tokens([len(word) for word in words])
    assert encoded == words


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_WORDS", 50)
    backend = _backend(GPT2)
    cache = _cache(backend)
    letters = "abcdefgh"
    for one in letters:
        text = "so " + " ".join(one + other for other in letters)
        assert await cache.encode(text) == pack_tokens(backend.encode(text).ids)
        assert len(cache._cached) <= 51


async def test_special_tokens_stay_in_place() -> None:
    backend = _backend(GPT2)
    end = backend.token_to_id("<|end|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", end)]
    )
    text = "one of many words"
    ids = unpack_tokens(await RouterTokenizer(backend).encode(text)).tolist()
    assert ids == backend.encode(text).ids
    assert (ids[0], ids[-1]) == (end, end)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": None},
    ],
)
def test_other_tokenizers_encode_whole_texts(change: dict[str, object]) -> None:
    described = json.loads(_backend(GPT2).to_str()) | change
    assert find_cuts(Tokenizer.from_str(json.dumps(described))) is None


@pytest.mark.parametrize(
    "token",
    [
        "to be",
        "  ",
        "\n-",
        AddedToken("<x>", single_word=True),
        AddedToken("<x>", lstrip=True),
        AddedToken("<x>", rstrip=True),
    ],
)
def test_added_tokens_that_may_take_whitespace_prevent_cutting(token: str | AddedToken) -> None:
    backend = _backend(GPT2)
    backend.add_tokens([token])
    assert find_cuts(backend) is None
