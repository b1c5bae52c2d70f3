import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd.common.blocks import extend_hashes, hash_root
from cpd.grammar.grammar import MAX_BYTES, Grammar, GrammarKind
from cpd.rpc import cpd_pb2 as pb
from engine.types import Finish, Output, Request, SamplingParams, ThinkingBudget, TokenLogprobs
from worker.wire_format import (
    InvalidRequestError,
    Limits,
    deadline_ms_to_wire,
    first_outputs_from_wire,
    output_to_wire,
    request_from_wire,
    sampling_to_wire,
)

LIMITS = Limits(vocab_size=100, max_model_len=64)
ROOT = hash_root(b"model")
NOW = 50.0


def submit(num_tokens: int = 20, **overrides: Any) -> pb.Submit:
    token_ids = overrides.pop("token_ids", [i % 100 for i in range(num_tokens)])
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8}
    sampling.update(overrides.pop("sampling", {}))
    fields: dict[str, Any] = {
        "request": 1,
        "tokens": struct.pack(f"<{len(token_ids)}i", *token_ids),
        "prompt_len": len(token_ids),
        "hash_root": ROOT,
        "block_hashes": b"".join(extend_hashes(ROOT, token_ids)),
        "sampling": pb.Sampling(**sampling),
        "n": 1,
    }
    return pb.Submit(**(fields | overrides))


def test_a_request_keeps_everything() -> None:
    message = submit(
        35,
        n=3,
        choice=2,
        tenant="t",
        priority=-2,
        deadline_ms=1500,
        sampling={
            "top_k": 5,
            "logit_bias": {7: -2.5},
            "seed": 2**64 - 1,
            "top_logprobs": 0,
            "stop_token_ids": [3, 99],
            "grammar": pb.Grammar(kind=pb.Grammar.KIND_REGEX, text="a+é"),
            "thinking_budget": pb.ThinkingBudget(tokens=0, end_token=7, start_token=0),
        },
    )
    request = request_from_wire(message, "r", LIMITS, NOW)
    assert replace(request, token_ids=list(request.token_ids)) == Request(
        id="r",
        token_ids=list(range(35)),
        prompt_len=35,
        params=SamplingParams(
            temperature=1.0,
            top_k=5,
            logit_bias={7: -2.5},
            seed=2**64 - 1,
            top_logprobs=0,
            max_tokens=8,
            stop_token_ids=frozenset({3, 99}),
            grammar=Grammar(GrammarKind.REGEX, "a+é"),
            thinking_budget=ThinkingBudget(0, 7, 0),
        ),
        hash_root=ROOT,
        block_hashes=extend_hashes(ROOT, list(range(35))),
        first_choice=2,
        n=3,
        tenant="t",
        priority=-2,
        received=NOW,
        deadline=NOW + 1.5,
        number=1,
    )


def test_a_deadline_is_passed_on_as_the_time_left() -> None:
    assert request_from_wire(submit(), "r", LIMITS, NOW).deadline == math.inf
    request = request_from_wire(submit(deadline_ms=1500), "r", LIMITS, NOW)
    assert [deadline_ms_to_wire(request, NOW + passed) for passed in (0, 1, 2)] == [1500, 500, 1]
    assert deadline_ms_to_wire(request_from_wire(submit(), "r", LIMITS, NOW), NOW) == 0


def test_unset_logprobs_are_none() -> None:
    assert request_from_wire(submit(), "r", LIMITS, NOW).params.top_logprobs is None


def test_output_sent_before_a_replay_is_not_prompt() -> None:
    request = request_from_wire(submit(20, prompt_len=18), "r", LIMITS, NOW)
    assert (request.prompt_len, len(request.token_ids)) == (18, 20)


def test_stop_tokens_outside_the_vocabulary_are_dropped() -> None:
    request = request_from_wire(submit(sampling={"stop_token_ids": [5, 100]}), "r", LIMITS, NOW)
    assert request.params.stop_token_ids == {5}


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"sampling": {"grammar": pb.Grammar(text="a")}}, "kind 0"),
        ({"sampling": {"grammar": pb.Grammar(kind=99, text="a")}}, "kind 99"),  # type: ignore[arg-type]
        ({"sampling": {"grammar": pb.Grammar(kind=pb.Grammar.KIND_EBNF, text="a" * (MAX_BYTES + 1))}}, "bytes"),
        ({"sampling": {"thinking_budget": pb.ThinkingBudget(tokens=9, end_token=100)}}, "thinking_budget"),
        ({"token_ids": [], "prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"prompt_len": 21}, "prompt_len"),
        ({"num_tokens": 64}, "context"),
        ({"token_ids": [100]}, "token id 100"),
        ({"token_ids": [-1]}, "token id"),
        ({"tokens": b"\0" * 81}, "tokens"),
        ({"hash_root": b"short"}, "hash_root"),
        ({"block_hashes": b""}, "block_hashes"),
        ({"block_hashes": b"x" * 17}, "block_hashes"),
        ({"block_hashes": b"x" * 32}, "block_hashes"),
        ({"n": 0}, "n 0"),
        ({"n": 2**32 - 1}, "n "),
        ({"n": 2, "prompt_len": 19}, "n must be 1"),
        ({"prompt_len": 12}, "already emitted"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"sampling": {"temperature": math.nan}}, "temperature"),
        ({"sampling": {"top_p": 0}}, "top_p"),
        ({"sampling": {"top_p": 1.5}}, "top_p"),
        ({"sampling": {"min_p": -0.1}}, "min_p"),
        ({"sampling": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"sampling": {"presence_penalty": math.inf}}, "presence_penalty"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling": {"logit_bias": {100: 1.0}}}, "logit_bias"),
        ({"sampling": {"logit_bias": {1: math.nan}}}, "logit_bias"),
        ({"sampling": {"top_logprobs": 101}}, "top_logprobs"),
    ],
)
def test_invalid_requests_are_refused_with_the_field_named(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        request_from_wire(submit(**overrides), "r", LIMITS, NOW)


floats = st.floats(-2, 2, width=32)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2, width=32),
        top_p=st.floats(0.125, 1, width=32),
        top_k=st.integers(0, 100),
        min_p=st.floats(0, 1, width=32),
        presence_penalty=floats,
        frequency_penalty=floats,
        repetition_penalty=st.floats(0.125, 2, width=32),
        logit_bias=st.dictionaries(st.integers(0, 99), floats),
        seed=st.integers(0, 2**64 - 1),
        top_logprobs=st.none() | st.integers(0, 20),
        max_tokens=st.integers(1, 100),
        min_tokens=st.integers(0, 100),
        stop_token_ids=st.frozensets(st.integers(0, 99)),
        thinking_budget=st.none()
        | st.builds(ThinkingBudget, st.integers(0, 99), st.integers(0, 99), st.none() | st.integers(0, 99)),
    )
)
def test_sampling_parameters_survive_the_round_trip(params: SamplingParams) -> None:
    message = submit()
    message.sampling.CopyFrom(sampling_to_wire(params))
    assert request_from_wire(message, "r", LIMITS, NOW).params == params


def first_tokens(*outputs: Output) -> pb.PrefillFirstTokens:
    return pb.PrefillFirstTokens(outputs=[output_to_wire(output) for output in outputs])


def request_for(n: int, top_logprobs: int | None = None, emitted: int = 0) -> Request:
    params = SamplingParams(top_logprobs=top_logprobs)
    return Request("r", [1] * (1 + emitted), 1, params, ROOT, [], first_choice=4, n=n)


def test_first_tokens_survive_the_round_trip() -> None:
    outputs = [
        Output("r", 4, [7], [TokenLogprobs(-0.5, [(7, -0.5), (8, -1.5)])], Finish.STOP),
        Output("r", 5, [8], [TokenLogprobs(-1.5, [])]),
    ]
    assert first_outputs_from_wire(first_tokens(*reversed(outputs)), request_for(2, 2), LIMITS) == outputs


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [Output("r", 4, [1], [])],
        [Output("r", 4, [1], []), Output("r", 4, [1], [])],
        [Output("r", 4, [1], []), Output("r", 5, [], [])],
        [Output("r", 4, [1], []), Output("r", 5, [1, 2], [])],
        [Output("r", 4, [1], []), Output("r", 5, [100], [])],
        [Output("r", 4, [1], []), Output("r", 5, [1], [TokenLogprobs(0.0, [])])],
    ],
)
def test_first_tokens_that_do_not_match_the_request_are_refused(outputs: list[Output]) -> None:
    with pytest.raises(InvalidRequestError):
        first_outputs_from_wire(first_tokens(*outputs), request_for(2), LIMITS)


def test_the_last_first_token_must_end_its_choice() -> None:
    request = request_for(1, emitted=15)  # of 16
    ended, unended = (first_tokens(Output("r", 4, [7], [], finish)) for finish in (Finish.LENGTH, None))
    assert first_outputs_from_wire(ended, request, LIMITS)
    with pytest.raises(InvalidRequestError, match="did not end a choice with the last of its 16 tokens"):
        first_outputs_from_wire(unended, request, LIMITS)
