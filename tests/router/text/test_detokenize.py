from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cpd.common.blocks import pack_tokens
from router.text.detokenize import Vocabulary

_PIECES = ["▁", "▁▁", "▁Hello", "▁wor", "ld", "a", "b", "é", "你", "!", "\ufffd", "\n"]


def _byte_level() -> Tokenizer:
    """A byte-level tokenizer like GPT-2's: tokens are one or several bytes, some of them parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "Ġhello", "he", "ðŁ", "ĻĤ", "Ã", "Ġ", "Ċ"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("naïve 🙂")])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: pieces with ▁ for a space, and byte tokens for other characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer


def _metaspace() -> Tokenizer:
    """Unigram with Metaspace, as in T5."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in _PIECES)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def _word_piece() -> Tokenizer:
    pieces = ["[UNK]", "hello", "wor", "##ld", "!", ",", "don", "'", "t", "."]
    tokenizer = Tokenizer(models.WordPiece(vocab={piece: index for index, piece in enumerate(pieces)}))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {
    "byte-level": _byte_level(),
    "byte fallback": _byte_fallback(),
    "metaspace": _metaspace(),
    "word piece": _word_piece(),
}


def _id(tokenizer: Tokenizer, piece: str) -> int:
    token_id = tokenizer.token_to_id(piece)
    assert token_id is not None, piece
    return token_id


def _stream(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    detokenizer = Vocabulary(tokenizer).detokenizer(pack_tokens(prompt))
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    every = st.integers(0, tokenizer.get_vocab_size() - 1)
    # the most telling tokens are few among the bytes: pick them as often
    last = st.integers(max(0, tokenizer.get_vocab_size() - 16), tokenizer.get_vocab_size() - 1)
    return st.lists(every | last, max_size=24)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_joined_pieces_equal_the_decoded_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    output = data.draw(_ids(tokenizer))
    assert "".join(_stream(tokenizer, [], output)) == tokenizer.decode(output)


@pytest.mark.parametrize("name", ["byte fallback", "metaspace"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_after_a_prompt_the_pieces_are_the_text_that_the_output_adds(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    words = st.sampled_from([_id(tokenizer, piece) for piece in ("▁Hello", "▁wor", "ld", "a", "你", "!")])
    prompt = data.draw(st.lists(words, min_size=1, max_size=20))
    output = data.draw(_ids(tokenizer))
    expected = tokenizer.decode(prompt + output).removeprefix(tokenizer.decode(prompt))
    assert "".join(_stream(tokenizer, prompt, output)) == expected


_CHAR_OF_BYTE = {
    Vocabulary(TOKENIZERS["byte-level"]).token_bytes(token_id)[0]: piece
    for piece, token_id in TOKENIZERS["byte-level"].get_vocab().items()
    if len(piece) == 1
}
_BYTE_TOKEN = {
    "byte-level": _CHAR_OF_BYTE.__getitem__,
    "byte fallback": "<0x{:02X}>".format,
}


@pytest.mark.parametrize("name", _BYTE_TOKEN)
@given(text=st.text(alphabet=st.characters(exclude_characters="\ufffd ", exclude_categories=["Cs"]), max_size=20))
@settings(deadline=None)
def test_no_piece_ends_within_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    output = [_id(tokenizer, _BYTE_TOKEN[name](byte)) for byte in text.encode()]
    assert "".join(_stream(tokenizer, [], output)) == text


def test_a_character_comes_whole_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    output = [_id(tokenizer, _CHAR_OF_BYTE[byte]) for byte in "é🙂".encode()]
    assert _stream(tokenizer, [], output) == ["", "é", "", "", "", "🙂", ""]


def test_special_tokens_have_no_text_and_other_added_ones_have() -> None:
    for name, special in (("byte-level", "<|end|>"), ("byte fallback", "<s>")):
        tokenizer = TOKENIZERS[name]
        output = [_id(tokenizer, token) for token in ("<tool>", special, "a")]
        assert "".join(_stream(tokenizer, [], output)) == "<tool>a"


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    for tokenizer in TOKENIZERS.values():
        assert "".join(_stream(tokenizer, [], [100_000])) == ""


def test_a_leading_space_stays_after_a_prompt_and_goes_without_one() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    prompt, output = [_id(tokenizer, "▁Hello")], [_id(tokenizer, "▁wor")]
    assert "".join(_stream(tokenizer, prompt, output)) == " wor"
    assert "".join(_stream(tokenizer, [], output)) == "wor"


@pytest.mark.parametrize(
    ("name", "piece", "expected"),
    [
        ("byte-level", "Ġhello", b" hello"),
        ("byte-level", "ðŁ", b"\xf0\x9f"),
        ("byte-level", "naïve 🙂", "naïve 🙂".encode()),
        ("byte-level", "<|end|>", b"<|end|>"),
        ("byte fallback", "▁Hello", b" Hello"),
        ("byte fallback", "<0xE2>", b"\xe2"),
        ("byte fallback", "<s>", b"<s>"),
    ],
)
def test_a_token_has_bytes_of_its_own(name: str, piece: str, expected: bytes) -> None:
    tokenizer = TOKENIZERS[name]
    assert Vocabulary(tokenizer).token_bytes(_id(tokenizer, piece)) == expected
