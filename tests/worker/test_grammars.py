"""Workers with a real model follow grammars: alone, with a prompt computed elsewhere, after a replay, and parked."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cpd.common.blocks import extend_hashes, hash_root
from cpd.grammar import grammar as grammars
from cpd.grammar.grammar import Grammar, GrammarKind
from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Request, SamplingParams
from kvtransfer.local import LocalNetwork
from tests.conftest import MakeCheckpoint
from tests.engine.fakes import make_request, prompt
from tests.waiting import eventually
from tests.worker.client import Answer, Client
from tests.worker.cluster import Running, running
from worker.engine_loader import load_engine

PERSON = grammars.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)


@asynccontextmanager
async def worker(
    redis_url: str, directory: Path, network: LocalNetwork, role: str = "combined"
) -> AsyncIterator[tuple[Running, Client]]:
    settings = {
        "model": str(directory),
        "device": "cpu",
        "dtype": "float32",
        "kv_memory": 16 << 20,
        "max_model_len": 600,
        "max_num_seqs": 16,
    }
    async with (
        running(role, redis_url, load=load_engine, network=network, **settings) as it,  # type: ignore[arg-type]
        Client(it) as client,
    ):
        yield it, client


class Model:
    """A checkpoint, and requests for it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        (self.eos,) = self.tokenizer.encode("<|end|>").ids

    def request(self, seed: int, grammar: Grammar | None = PERSON, length: int = 100, n: int = 1) -> Request:
        token_ids = random.Random(seed).choices(range(480), k=length)
        params = SamplingParams(
            grammar=grammar, seed=seed, max_tokens=150, stop_token_ids=frozenset({self.eos}), top_logprobs=1
        )
        root = hash_root(b"model")
        return Request(f"r{seed}", token_ids, length, params, root, extend_hashes(root, token_ids), n=n)

    def assert_valid(self, answer: Answer, choice: int = 0) -> None:
        assert answer.refusal is None
        assert answer.finish[choice] is Finish.STOP
        document = json.loads(self.tokenizer.decode(answer.tokens[choice]))
        assert document.keys() == {"name", "ok"}
        assert len(document["name"]) <= 6


@pytest.fixture(scope="module")
def model(checkpoint: MakeCheckpoint) -> Model:
    return Model(checkpoint("qwen3"))


async def test_a_remote_prefill_a_replay_and_a_move_give_the_same_document(redis_url: str, model: Model) -> None:
    network = LocalNetwork()
    async with (
        worker(redis_url, model.directory, network) as (_, here),
        worker(redis_url, model.directory, network) as (_, there),
        worker(redis_url, model.directory, network, "prefill") as (prefill, _),
    ):
        assert here.hello.grammars
        for seed in range(4):
            n = 1 + 2 * (seed % 2)
            request = model.request(seed, n=n)
            alone = await here.submit(request, seed)
            await here.done(alone)
            remote = await there.submit(request, seed, candidates=[prefill.candidate])
            await there.done(remote)
            assert remote.prefilled[0].prefill_worker == prefill.id
            assert alone.tokens == remote.tokens
            for choice in range(n):
                model.assert_valid(alone, choice)
            emitted = alone.tokens[0][: 3 + seed]
            tokens = [*request.token_ids, *emitted]
            hashes = extend_hashes(request.hash_root, tokens)
            replay = replace(request, token_ids=tokens, block_hashes=hashes, n=1)
            replayed = await there.submit(replay, 100 + seed, candidates=[prefill.candidate])
            await there.done(replayed)
            assert emitted + replayed.tokens[0] == alone.tokens[0]
        await here.balanced()
        await there.balanced()


async def test_a_parked_document_goes_on_where_it_was_parked(redis_url: str, model: Model) -> None:
    async with worker(redis_url, model.directory, LocalNetwork()) as (_, router):
        grammar = grammars.regex("[a-z]{3}(-[a-z]{3}){80}")
        request = model.request(1, grammar)
        request = replace(request, params=replace(request.params, max_tokens=400))
        whole = await router.submit(request, 1)
        await router.done(whole)
        answer = await router.submit(request, 2)
        await eventually(lambda: len(answer.tokens.get(0, ())) > 3 or answer.done)
        await router.park(2)
        await router.done(answer)
        assert answer.refusal is not None
        assert answer.refusal.kind == pb.Refusal.KIND_PARKED
        emitted = answer.tokens[0]
        tokens = [*request.token_ids, *emitted]
        rest = replace(request, token_ids=tokens, block_hashes=extend_hashes(request.hash_root, tokens))
        resumed = await router.submit(rest, 3, resumes=pb.Park(request=2, attempt=0))
        await router.done(resumed)
        assert emitted + resumed.tokens[0] == whole.tokens[0]


async def test_a_grammar_that_can_not_be_compiled_fails_its_request_and_no_other(redis_url: str, model: Model) -> None:
    async with worker(redis_url, model.directory, LocalNetwork()) as (_, router):
        wrong = await router.submit(model.request(1, Grammar(GrammarKind.REGEX, "(")), 1)
        right = await router.submit(model.request(2), 2)
        await router.done(wrong, right)
        assert wrong.refusal is not None
        assert wrong.refusal.kind == pb.Refusal.KIND_FAILED
        assert "unclosed group" in wrong.refusal.message
        model.assert_valid(right)
        await router.balanced()


async def test_a_request_may_be_aborted_while_its_grammar_is_compiled(redis_url: str, model: Model) -> None:
    async with worker(redis_url, model.directory, LocalNetwork()) as (_, router):
        await router.submit(model.request(1), 1)
        await router.abort(1)
        after = await router.submit(model.request(2), 2)
        await router.done(after)
        model.assert_valid(after)
        await asyncio.sleep(0)
        await router.balanced()


async def test_a_worker_without_a_tokenizer_says_so_and_refuses_grammars(redis_url: str) -> None:
    async with running("combined", redis_url, network=LocalNetwork()) as it, Client(it) as router:
        assert not router.hello.grammars
        request = make_request("a", prompt(20))
        grammar = grammars.regex("a")
        answer = await router.submit(replace(request, params=replace(request.params, grammar=grammar)), 1)
        await router.done(answer)
        assert answer.refusal is not None
        assert "no tokenizer" in answer.refusal.message
