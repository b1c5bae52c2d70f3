"""Texts of a wanted number of tokens."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.errors import BenchError
from bench.tokens import Texts, measure
from models.tiny import CHECKPOINT
from tests.bench import tokenizers
from tests.conftest import MakeCheckpoint

LENGTHS = (1, 2, 3, 16, 17, 100, 511, 512, 4001)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


class Server:
    """Counts the tokens of prompts as a server with a chat template would."""

    def __init__(self, directory: Path, overhead: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._overhead = overhead

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids) + self._overhead

    async def ask(self, text: str) -> int | None:
        return self.count(text)


async def silent(_: str) -> int | None:
    return None


@pytest.fixture(scope="module", params=["tiny", "small", "sentencepiece", "unigram"])
def directory(
    request: pytest.FixtureRequest, checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory with a tokenizer.json."""
    match request.param:
        case "tiny":
            return CHECKPOINT
        case "small":
            return checkpoint("llama3")
        case kind:
            make: Callable[[], Tokenizer] = getattr(tokenizers, kind)
            return tokenizers.write(tmp_path_factory.mktemp(kind), make())


def test_with_a_tokenizer_texts_have_exactly_the_wanted_length(directory: Path) -> None:
    texts = Texts.with_tokenizer(directory)
    assert texts.count
    for tokens in LENGTHS:
        for seed in range(10):
            assert texts.count(texts.text(rng(seed), tokens)) == tokens


def test_lengths_of_texts_put_together_add_up(directory: Path) -> None:
    texts = Texts.with_tokenizer(directory)
    assert texts.count
    for tokens in LENGTHS:
        text = texts.text(rng(1), 20) + texts.more(rng(2), tokens) + texts.more(rng(3), 7)
        assert texts.count(text) == tokens + 27


def test_a_text_has_at_least_one_word() -> None:
    texts = Texts.measured(1.3, overhead=9)
    for tokens in (1, 0, -5):
        assert texts.text(rng(), tokens).strip()
        assert texts.more(rng(), tokens).strip()


def test_the_same_generator_makes_the_same_text_and_another_one_differs_early(directory: Path) -> None:
    for texts in (Texts.with_tokenizer(directory), Texts.measured(1.3, 9)):
        assert texts.text(rng(1), 64) == texts.text(rng(1), 64)
        beginnings = {tuple(texts.text(rng(seed), 64).split()[:16]) for seed in range(200)}
        assert len(beginnings) == 200


def test_texts_survive_the_way_to_another_process(directory: Path) -> None:
    texts = Texts.with_tokenizer(directory, overhead=3)
    copy: Texts = pickle.loads(pickle.dumps(texts))
    assert copy.text(rng(1), 100) == texts.text(rng(1), 100)
    assert copy.overhead == 3
    assert copy.count
    assert texts.count
    assert copy.count("the door") == texts.count("the door")


def test_a_tokenizer_that_would_truncate_counts_everything(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    texts = Texts.with_tokenizer(tokenizers.write(tmp_path, tokenizer))
    assert texts.count
    assert texts.count(texts.text(rng(), 100)) == 100
    assert texts.count(texts.text(rng(), 3)) == 3


def test_without_words_of_one_token_an_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="leave out --tokenizer"):
        Texts.with_tokenizer(tokenizers.write(tmp_path, tokenizers.characters()))


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=str(tmp_path / "tokenizer.json")):
        Texts.with_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BenchError, match=str(tmp_path / "tokenizer.json")):
        Texts.with_tokenizer(tmp_path)


async def test_two_requests_tell_what_a_word_and_a_prompt_cost(directory: Path) -> None:
    server = Server(directory, overhead=9)
    texts = await measure(server.ask)
    assert texts.count is None
    lengths = [server.count(texts.text(rng(seed), 1000 - texts.overhead)) for seed in range(20)]
    assert np.mean(lengths) == pytest.approx(1000, rel=0.02)
    assert max(abs(length - 1000) for length in lengths) < 120


async def test_words_of_one_token_are_measured_exactly() -> None:
    async def ask(text: str) -> int | None:
        return len(text.split()) + 5

    texts = await measure(ask)
    assert texts.overhead == 5
    assert len(texts.text(rng(), 512).split()) == 512


async def test_with_a_tokenizer_the_server_tells_only_what_it_adds(directory: Path) -> None:
    server = Server(directory, overhead=9)
    texts = await measure(server.ask, directory)
    assert texts.overhead == 9
    assert server.count(texts.text(rng(), 512 - 9)) == 512


async def test_a_silent_server_needs_a_tokenizer(directory: Path) -> None:
    with pytest.raises(BenchError, match="--tokenizer"):
        await measure(silent)
    assert (await measure(silent, directory)).overhead == 0


async def test_another_tokenizer_than_the_servers_is_found_out(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(BenchError, match="not the server's tokenizer"):
        await measure(Server(checkpoint("llama3"), overhead=9).ask, CHECKPOINT)


async def test_counts_that_make_no_sense_are_no_basis() -> None:
    async def always_seven(_: str) -> int | None:
        return 7

    with pytest.raises(BenchError, match="--tokenizer"):
        await measure(always_seven)


def test_the_words_are_short_lower_case_and_different() -> None:
    words = (Path(tokenizers.__file__).parents[2] / "bench" / "words.txt").read_text().split()
    assert len(words) == len(set(words)) >= 1000
    assert all(word.isascii() and word.isalpha() and word.islower() and len(word) < 10 for word in words)
