"""Outputs follow their grammars, with a real model: alone, in a batch, with choices, preempted and replayed."""

import importlib
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from cpd.common.blocks import extend_hashes
from cpd.grammar import grammar as grammars
from cpd.grammar.compiler import CompiledGrammar, Vocabulary
from cpd.grammar.grammar import Grammar
from engine.engine import Engine
from engine.model.config import load_config
from engine.scheduling import lookahead
from engine.scheduling.plan import Plan
from engine.types import Finish, Request, SamplingParams, ThinkingBudget
from tests.checkpoints import load_oracle
from tests.conftest import MakeCheckpoint
from tests.engine.fakes import FakeRunner, Served, assert_all_released, drain, engine_of
from tests.engine.fakes import make_request as make_fake_request
from tests.engine.test_engine_model import make_engine, make_request

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = grammars.json_schema(SCHEMA)
SENTENCE = "the grammar says all of this text, and nothing is left for the model to say, "


class Model:
    """A checkpoint, its tokenizer, and the grammars compiled for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.vocab_size = load_config(directory).vocab_size
        (self.eos,) = self.tokenizer.encode("<|end|>").ids
        self.vocabulary = Vocabulary.of_checkpoint(directory, self.vocab_size)
        self._compiled: dict[bytes, CompiledGrammar] = {}

    def engine(self, num_pages: int = 400) -> Engine:
        return make_engine(self.directory, num_pages)

    def request(self, name: str, grammar: Grammar | None, *, length: int = 10, n: int = 1, **params: Any) -> Request:
        token_ids = random.Random(name).choices(range(480), k=length)
        given: dict[str, Any] = {"max_tokens": 200, "stop_token_ids": frozenset({self.eos}), "seed": 1, **params}
        request = make_request(name, token_ids, SamplingParams(grammar=grammar, **given), n)
        return request if grammar is None else self.constrained(request)

    def constrained(self, request: Request) -> Request:
        grammar = request.params.grammar
        assert grammar is not None
        compiled = self._compiled.get(grammar.digest) or self.vocabulary.compile(grammar)
        self._compiled[grammar.digest] = compiled
        return replace(request, constraint=compiled.constraint(request.params.stop_token_ids))

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def model(checkpoint: MakeCheckpoint) -> Model:
    return Model(checkpoint("llama3"))


def serve(engine: Engine, *requests: Request) -> Served:
    for request in requests:
        engine.add(request)
    served = drain(engine)
    assert_all_released(engine)
    return served


def assert_valid(text: str, schema: Mapping[str, Any] = SCHEMA) -> None:
    importlib.import_module("jsonschema").validate(json.loads(text), schema)


def test_every_document_of_a_batch_is_valid_and_the_same_as_alone(model: Model) -> None:
    """With penalties, a bias, filters, log-probabilities and, beside them, requests without a grammar."""
    more: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {7: 100.0, model.eos: 100.0}},
        {"top_logprobs": 2},
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"min_tokens": 30},
    ]
    constrained = [model.request(f"r{i}", PERSON, seed=i, **more[i % len(more)]) for i in range(13)]
    free = [model.request(f"free{i}", None, seed=i, max_tokens=40) for i in range(3)]
    batch = serve(model.engine(), *constrained, *free)
    finished = 0
    for request in constrained:
        tokens = batch.token_ids[request.id, 0]
        if batch.finish[request.id, 0] is Finish.STOP:
            finished += 1
            assert tokens[-1] == model.eos
            assert_valid(model.text(tokens))
        else:
            assert len(tokens) == 200
    assert finished >= 10
    alone = model.engine()
    for request in (*constrained, *free):
        assert serve(alone, request).token_ids[request.id, 0] == batch.token_ids[request.id, 0]


def test_each_choice_follows_the_grammar_by_itself(model: Model) -> None:
    served = serve(model.engine(), model.request("r", grammars.regex("[a-f]{12}"), n=8))
    texts = [model.text(served.token_ids["r", choice]) for choice in range(8)]
    assert all(len(text) == 12 and set(text) <= set("abcdef") for text in texts)
    assert len(set(texts)) > 1
    assert set(served.finish.values()) == {Finish.STOP}


def test_a_preempted_output_goes_on_where_it_was(model: Model) -> None:
    requests = [model.request(f"r{i}", grammars.regex("([a-z]{3}-)*"), seed=i, max_tokens=100) for i in range(8)]
    small, large = model.engine(num_pages=24), model.engine()
    assert serve(small, *requests).token_ids == serve(large, *requests).token_ids
    assert small.stats().preemptions > 0


@pytest.mark.parametrize("emitted", [1, 5, 9])
def test_a_replay_in_the_middle_of_a_document_goes_on_with_the_same_tokens(model: Model, emitted: int) -> None:
    request = model.request("r", PERSON, seed=3)
    whole = serve(model.engine(), request).token_ids["r", 0]
    tokens = [*request.token_ids, *whole[:emitted]]
    replay = replace(request, token_ids=tokens, block_hashes=extend_hashes(request.hash_root, tokens))
    assert serve(model.engine(), replay).token_ids["r", 0] == whole[emitted:]


def test_a_replay_of_an_output_that_does_not_follow_the_grammar_is_refused(model: Model) -> None:
    request = model.request("r", grammars.regex("[a-f]+"))
    tokens = [*request.token_ids, *model.tokenizer.encode("x").ids[:1]]
    replay = replace(request, token_ids=tokens, block_hashes=extend_hashes(request.hash_root, tokens))
    engine = model.engine()
    with pytest.raises(ValueError, match="does not follow its grammar"):
        engine.add(replay)
    assert_all_released(engine)


def test_a_limit_on_the_tokens_cuts_a_document(model: Model) -> None:
    served = serve(model.engine(), model.request("r", PERSON, max_tokens=4))
    assert (len(served.token_ids["r", 0]), served.finish["r", 0]) == (4, Finish.LENGTH)


def test_an_output_that_can_only_end_ends_whatever_the_minimum_is(model: Model) -> None:
    served = serve(model.engine(), model.request("r", grammars.choice(["yes", "no"]), min_tokens=50))
    assert served.finish["r", 0] is Finish.STOP
    assert model.text(served.token_ids["r", 0]) in ("yes", "no")


def test_an_output_may_end_where_the_grammar_goes_on_only_after_the_minimum(model: Model) -> None:
    bias = {model.eos: 100.0}
    served = serve(model.engine(), model.request("r", grammars.regex("[a-f ]*"), min_tokens=7, logit_bias=bias))
    assert (len(served.token_ids["r", 0]), served.finish["r", 0]) == (8, Finish.STOP)


def test_tokens_that_a_grammar_forces_need_no_step_of_their_own(model: Model) -> None:
    engine, steps = model.engine(), 0
    engine.add(model.request("r", grammars.regex(f"([ab]{SENTENCE}){{3}}")))
    served = Served()
    while engine.has_work:
        served.take(engine.step())
        steps += 1
    tokens = served.token_ids["r", 0]
    assert model.text(tokens).count(SENTENCE) == 3
    assert steps < len(tokens) / 3
    assert_all_released(engine)


def test_forced_tokens_are_the_same_however_the_output_is_computed(model: Model) -> None:
    """In a batch, preempted, with choices, and with log-probabilities, which come one token at a time."""
    grammar = grammars.regex(f"([a-z]{SENTENCE}([a-z]{{2}}-)*)+")
    requests = [model.request(f"r{i}", grammar, seed=i, max_tokens=90 + i, length=5 + 13 * i) for i in range(12)]
    small, large = model.engine(num_pages=40), model.engine()
    batch = serve(small, *requests)
    assert small.stats().preemptions > 0
    for request in requests:
        alone = serve(large, request)
        assert alone.token_ids[request.id, 0] == batch.token_ids[request.id, 0]
        with_logprobs = replace(request, params=replace(request.params, top_logprobs=2))
        served = serve(large, with_logprobs)
        assert served.token_ids[request.id, 0] == alone.token_ids[request.id, 0]
        assert len(served.logprobs[request.id, 0]) == len(served.token_ids[request.id, 0])
    choices = serve(large, replace(requests[3], n=3))
    assert choices.token_ids["r3", 0] == batch.token_ids["r3", 0]


def test_documents_end_before_their_limit(model: Model) -> None:
    """Also where strings would have no end, and whatever the limit is."""
    schema = {"type": "object", "properties": {"texts": {"type": "array", "minItems": 2}, "name": {"type": "string"}}}
    grammar = grammars.json_schema(schema | {"required": ["texts", "name"]})
    requests = [model.request(f"r{i}", grammar, seed=i, max_tokens=40 + 3 * i) for i in range(16)]
    served = serve(model.engine(), *requests)
    for request in requests:
        tokens = served.token_ids[request.id, 0]
        assert served.finish[request.id, 0] is Finish.STOP
        assert len(tokens) <= request.params.max_tokens
        assert_valid(model.text(tokens), schema)


def test_log_probabilities_of_an_ending_are_those_of_the_model(model: Model) -> None:
    request = model.request("r", grammars.json_schema({"type": "array", "items": {"type": "string"}}), max_tokens=25)
    plain = serve(model.engine(), request)
    served = serve(model.engine(), replace(request, params=replace(request.params, top_logprobs=1)))
    tokens = served.token_ids["r", 0]
    assert (tokens, served.finish["r", 0]) == (plain.token_ids["r", 0], Finish.STOP)
    with torch.inference_mode():
        logits = load_oracle(model.directory)(input_ids=torch.tensor([[*request.token_ids, *tokens]])).logits[0]
    of_model = torch.log_softmax(logits.float(), dim=-1)[len(request.token_ids) - 1 :]
    for position, (token_id, scored) in enumerate(zip(tokens, served.logprobs["r", 0], strict=True)):
        assert scored.logprob == pytest.approx(of_model[position, token_id].item(), abs=1e-3)


def test_a_replay_within_a_forced_run_or_an_ending_goes_on_with_the_same_tokens(model: Model) -> None:
    grammar = grammars.regex(f"([ab]{SENTENCE})+[a-z ]*")
    request = model.request("r", grammar, seed=3, max_tokens=70)
    whole = serve(model.engine(), request).token_ids["r", 0]
    engine = model.engine()
    for emitted in range(1, len(whole)):
        tokens = [*request.token_ids, *whole[:emitted]]
        replay = replace(request, token_ids=tokens, block_hashes=extend_hashes(request.hash_root, tokens))
        assert serve(engine, replay).token_ids["r", 0] == whole[emitted:]


def test_a_dead_end_fails_the_request_and_no_other(model: Model) -> None:
    """The only way on is a stop token of the client's, which may come only at the end."""
    brace = model.tokenizer.encode("{").ids[0]
    at_once = model.request("at once", grammars.regex("\\{a"), stop_token_ids=frozenset({model.eos, brace}))
    later = model.request("later", grammars.regex("[a-f]{30}\\{a"), stop_token_ids=frozenset({model.eos, brace}))
    served = serve(model.engine(), at_once, later, model.request("other", PERSON))
    assert served.failed.keys() == {"at once", "later"}
    assert all("no token" in reason for reason in served.failed.values())
    assert ("at once", 0) not in served.token_ids
    assert len(model.text(served.token_ids["later", 0])) == 30
    assert_valid(model.text(served.token_ids["other", 0]))


@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_runner_that_does_not_mask_fails_the_request(model: Model, prefill_only: bool) -> None:
    """No document is called valid that is not. The fake runner chooses tokens by a rule of its own."""
    runner = FakeRunner(50)
    engine = engine_of(runner)
    fake = make_fake_request("r", list(range(20)), n=2, prefill_only=prefill_only, max_tokens=50)
    grammar = grammars.regex("[0-9]{40}")
    params = replace(fake.params, grammar=grammar, stop_token_ids=frozenset({model.eos}))
    engine.add(model.constrained(replace(fake, params=params)))
    served = drain(engine)
    assert served.failed.keys() == {"r"}
    assert not served.finish
    assert_all_released(engine)


def test_a_request_whose_grammar_nobody_compiled_is_refused(model: Model) -> None:
    request = replace(model.request("r", PERSON), constraint=None)
    with pytest.raises(ValueError, match="can't enforce"):
        model.engine().add(request)


def test_the_step_after_a_constrained_one_is_not_launched_ahead(model: Model) -> None:
    engine = model.engine()
    for request, ahead in ((model.request("free", None), True), (model.request("r", PERSON), False)):
        engine.add(request)
        while not engine.scheduler.running:
            engine.step()
        plan: Plan = engine.scheduler.schedule_decodes()
        assert bool(lookahead.overlapped_decodes(engine.scheduler, plan)) is ahead
        engine.abort(request.id)


@pytest.mark.parametrize(("tokens", "ahead"), [(0, False), (3, False), (100, True)])
def test_a_step_in_which_reasoning_must_end_is_not_launched_ahead(model: Model, tokens: int, ahead: bool) -> None:
    engine = model.engine()
    engine.add(model.request("r", None, thinking_budget=ThinkingBudget(tokens, end_token=7)))
    for _ in range(3):
        engine.step()
    assert bool(lookahead.overlapped_decodes(engine.scheduler, engine.scheduler.schedule_decodes())) is ahead
    engine.abort("r")


def test_reasoning_ends_after_its_budget_in_every_choice_and_after_a_replay(model: Model) -> None:
    params: dict[str, Any] = {
        "max_tokens": 40,
        "thinking_budget": ThinkingBudget(12, end_token=7),
        "seed": 4,
        "logit_bias": {7: -50.0},
    }
    for grammar in (None, grammars.ebnf("start: /[a-z ]*/ <[7]> /[a-z]{3,9}/")):
        request = model.request("r", grammar, n=3, length=20, **params)
        served = serve(model.engine(), request)
        for choice in range(3):
            assert served.token_ids["r", choice].index(7) == 12
        whole = served.token_ids["r", 0]
        for known in (11, 12, 13):
            token_ids = [*request.token_ids, *whole[:known]]
            hashes = extend_hashes(request.hash_root, token_ids)
            replay = replace(request, n=1, token_ids=token_ids, block_hashes=hashes)
            assert serve(model.engine(), replay).token_ids["r", 0] == whole[known:]
