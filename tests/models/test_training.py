"""Batches, initial weights and the training loop."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.tiny import CHECKPOINT
from models.tiny import train as training
from models.tiny.batches import Sampler
from models.tiny.data.dialogue import request
from models.tiny.data.requests import KINDS
from models.tiny.initial import initialise
from models.tiny.make import TURN_END
from models.tiny.network import Network, Shape
from models.tiny.tokenizer import prompt
from tests.checkpoints import load_oracle


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_batches_are_full_and_the_same_every_time(tokenizer: Tokenizer) -> None:
    one, other = (Sampler(tokenizer, 7).recall(3, 1024, 256) for _ in range(2))
    assert one.tokens.shape == one.answers.shape == (4, 256)
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.answers, other.answers)
    assert not torch.equal(one.tokens, Sampler(tokenizer, 7).recall(4, 1024, 256).tokens)


def test_only_what_the_assistant_says_counts_as_answer(tokenizer: Tokenizer) -> None:
    batch = Sampler(tokenizer, 7).small_talk(0, 4096, 256)
    ids, answers = batch.tokens[0].tolist(), batch.answers[0].tolist()
    answer = [token for token, number in zip(ids, answers, strict=True) if number == 1]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert (
        tokenizer.decode(answer, skip_special_tokens=False) == text.split("<|im_start|>assistant\n")[1].split("\n")[0]
    )
    assert answer[-1] == tokenizer.token_to_id(TURN_END)


def test_a_sequence_is_what_serving_makes_of_its_text(tokenizer: Tokenizer) -> None:
    ids = Sampler(tokenizer, 7).small_talk(0, 512, 512).tokens[0].tolist()
    whole_turns = ids[: len(ids) - ids[::-1].index(tokenizer.token_to_id(TURN_END))]
    assert tokenizer.encode(tokenizer.decode(whole_turns, skip_special_tokens=False)).ids == whole_turns


def test_sequences_of_requests_have_room_for_the_longest_answer(tokenizer: Tokenizer) -> None:
    for kind in KINDS:
        messages = [request(Random(seed), kind)[1] for seed in range(40)]
        longest = max(len(tokenizer.encode(prompt(two[:1]) + two[-1]["content"]).ids) for two in messages)
        assert longest < max(training.TURN_LENGTHS) / 1.5, kind.name


@pytest.mark.parametrize("length", [256, 4096])
@torch.no_grad()
def test_initial_weights_copy_what_came_before(length: int) -> None:
    network = Network(Shape(vocab_size=1000))
    initialise(network, 0)
    once = torch.randint(1000, (length // 2,), generator=torch.Generator().manual_seed(0))
    tokens = once.repeat(2)
    guessed = network.logits(network(tokens[None])[0, :-1]).argmax(-1)
    second = slice(length // 2 + 8, None)
    assert (guessed[second] == tokens[1:][second]).float().mean() > 0.8


@torch.no_grad()
def test_initial_weights_find_a_number_among_those_just_counted() -> None:
    network = Network(Shape(vocab_size=1000))
    initialise(network, 0)
    space, comma, *digits = range(10, 22)
    count = [token for number in range(10, 30) for token in (comma, space, digits[number // 10], digits[number % 10])]

    def found(after_27: int) -> torch.Tensor:
        """What the first two layers make of each token of a count, asked to count to 27."""
        tokens = torch.tensor([[300, 301, space, digits[2], digits[7], after_27, 302, *count]])
        cos, sin = (network.get_buffer(name)[: tokens.shape[1]] for name in ("cos", "sin"))
        hidden = network.embed_tokens(tokens)
        for layer in network.decoder()[:2]:
            hidden = layer(hidden, cos, sin)
        result: torch.Tensor = hidden[0, -len(count) :]
        return result

    changed = (found(400) - found(401)).norm(dim=-1)[7::4]
    largest = changed.topk(2)
    assert largest.indices[0] == 27 - 11
    assert largest.values[0] > 2 * largest.values[1]


@torch.no_grad()
def test_the_network_is_qwen3_as_transformers_has_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = Network(Shape(tokenizer.get_vocab_size()))
    initialise(network, 0)
    for parameter in network.parameters():
        parameter.copy_(parameter.bfloat16())
    training.write(network, tokenizer, tmp_path)
    tokens = torch.randint(1000, (1, 300), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        network.logits(network(tokens)), load_oracle(tmp_path)(input_ids=tokens).logits, rtol=1e-3, atol=1e-3
    )


def test_training_leaves_what_finds_a_place_as_it_is(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "train_tokenizer", lambda seed: tokenizer)
    monkeypatch.setattr(training, "TOKENS", 128)
    training.train(tmp_path / "state", tmp_path, 2)
    weights = load_file(tmp_path / "model.safetensors")
    network = Network(Shape(tokenizer.get_vocab_size()))
    trained = initialise(network, training.SEED)
    for name, before in network.checkpoint().items():
        changed = weights[name] != before
        assert not (changed & (trained[name.removeprefix("model.")] == 0)).any(), name
    assert (trained["layers.2.self_attn.q_proj.weight"] == 0).all()
    size = network.shape.head_dim
    assert (trained["layers.1.self_attn.q_proj.weight"][-size:] == 0).all()
    assert (trained["layers.3.self_attn.q_proj.weight"] == 1).all()


def test_training_goes_on_from_where_it_was_saved(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "train_tokenizer", lambda seed: tokenizer)
    monkeypatch.setattr(training, "TOKENS", 128)
    training.train(tmp_path / "state", tmp_path / "model", 2)
    after_two = load_file(tmp_path / "model" / "model.safetensors")
    training.train(tmp_path / "state", tmp_path / "model", 3)
    after_three = load_file(tmp_path / "model" / "model.safetensors")
    steps = [json.loads(line)["step"] for line in (tmp_path / "state" / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]
    name = "model.embed_tokens.weight"
    assert not torch.equal(after_two[name], after_three[name])
    torch.testing.assert_close(after_two[name], after_three[name], rtol=0.1, atol=0.02)
