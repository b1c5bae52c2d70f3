from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cpd.rpc import cpd_pb2 as pb
from router.dispatch.output import Choice
from router.text.detokenize import Vocabulary

END = 1


def _choice(
    tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0, *, include_stop: bool = False
) -> Choice:
    return Choice(0, Vocabulary(tokenizer).detokenizer(b""), stops, min_tokens, include_stop)


def _scores(token_ids: Sequence[int]) -> list[pb.TokenLogprobs]:
    return [pb.TokenLogprobs(logprob=-1.0, top_ids=[token_id], top_logprobs=[-1.0]) for token_id in token_ids]


def test_text_comes_in_deltas_until_the_end(tokenizer: Tokenizer) -> None:
    choice = _choice(tokenizer)
    first, second = tokenizer.encode("quick fox").ids[:1], tokenizer.encode("quick fox").ids[1:]
    assert not choice.has_delta
    choice.push(first, [], pb.FINISH_NONE)
    delta = choice.take()
    assert (delta.text, delta.token_ids, choice.finish) == (tokenizer.decode(first), first, None)
    assert not choice.has_delta
    choice.push(second, [], pb.FINISH_LENGTH)
    delta = choice.take()
    assert (delta.text, delta.token_ids, choice.finish) == (tokenizer.decode(second), second, "length")
    assert choice.num_tokens == len(first) + len(second)


def test_the_token_that_ends_the_output_counts_but_is_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox").ids
    choice = _choice(tokenizer)
    # a stop token that is ordinary text
    choice.push([*ids, ids[-1]], _scores([*ids, ids[-1]]), pb.FINISH_STOP)
    delta = choice.take()
    assert delta.text == "fox"
    assert delta.token_ids == [*ids, ids[-1]]
    assert [score.token_id for score in delta.scores] == ids
    assert (choice.finish, choice.num_tokens) == ("stop", len(ids) + 1)


@pytest.mark.parametrize(("stops", "finish"), [((), pb.FINISH_STOP), (("fox",), pb.FINISH_NONE)])
def test_what_ends_the_output_is_part_of_it_if_asked_for(
    tokenizer: Tokenizer, stops: Sequence[str], finish: pb.FinishReason.ValueType
) -> None:
    ids = tokenizer.encode("quick fox").ids
    choice = _choice(tokenizer, stops, include_stop=True)
    choice.push(ids, _scores(ids), finish)
    delta = choice.take()
    assert (delta.text, delta.token_ids, choice.finish, choice.num_tokens) == ("quick fox", ids, "stop", len(ids))
    assert [score.token_id for score in delta.scores] == ids


def test_a_special_token_that_ends_the_output_has_no_text_even_then(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox").ids
    choice = _choice(tokenizer, include_stop=True)
    choice.push([*ids, END], [], pb.FINISH_STOP)
    assert choice.take().text == "fox"
    assert (choice.finish, choice.num_tokens) == ("stop", len(ids) + 1)


def test_a_character_that_stays_incomplete_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    choice = _choice(tokenizer)
    byte = tokenizer.token_to_id("ð") or 0
    choice.push([byte], _scores([byte]), pb.FINISH_NONE)
    assert not choice.has_delta
    choice.push([byte], _scores([byte]), pb.FINISH_LENGTH)
    delta = choice.take()
    assert delta.text == "\ufffd\ufffd"
    assert len(delta.scores) == 2


def test_a_stop_string_ends_the_choice_within_a_message_and_drops_the_rest(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox jumps").ids
    choice = _choice(tokenizer, ["brown"])
    choice.push(ids, _scores(ids), pb.FINISH_LENGTH)
    delta = choice.take()
    assert (delta.text, choice.finish) == ("the quick ", "stop")
    assert choice.num_tokens < len(ids)
    assert tokenizer.decode(delta.token_ids) == "the quick brown"
    assert "".join(tokenizer.decode([score.token_id]) for score in delta.scores).startswith("the quick")


def test_text_that_may_start_a_stop_string_waits_and_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("lazy d").ids
    choice = _choice(tokenizer, ["dog"])
    choice.push(ids, [], pb.FINISH_NONE)
    assert choice.take().text == "lazy "
    choice.push([END], [], pb.FINISH_STOP)
    assert choice.take().text == "d"


def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox fox fox fox").ids
    choice = _choice(tokenizer, ["fox"], min_tokens=len(ids))
    choice.push(ids, [], pb.FINISH_NONE)
    assert choice.finish == "stop"
    assert choice.take().text == "fox fox fox "


@given(data=st.data())
def test_scores_come_with_the_text_they_belong_to(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(2, tokenizer.get_vocab_size() - 1), min_size=1, max_size=20))
    stops = data.draw(st.lists(st.text(alphabet="the \ufffd", min_size=1, max_size=3), max_size=2))
    choice = _choice(tokenizer, stops)
    text, scores = "", []
    for position, token_id in enumerate(ids):
        if choice.finish is not None:
            break
        finish = pb.FINISH_LENGTH if position == len(ids) - 1 else pb.FINISH_NONE
        choice.push([token_id], _scores([token_id]), finish)
        if choice.has_delta:
            delta = choice.take()
            assert all(score.offset < len(text + delta.text) or choice.finish for score in delta.scores)
            text += delta.text
            scores += delta.scores
    assert [score.token_id for score in scores] == ids[: len(scores)]
    assert [score.offset for score in scores] == sorted(score.offset for score in scores)
    if not any(stop in tokenizer.decode(ids) for stop in stops):
        assert len(scores) == len(ids)
        assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("stops", [(), ("never",)])
def test_all_token_ids_come_out_once(tokenizer: Tokenizer, stops: Sequence[str]) -> None:
    ids = tokenizer.encode("naïvely: 你好 🙂").ids
    choice = _choice(tokenizer, stops)
    taken: list[int] = []
    for token_id in ids:
        choice.push([token_id], [], pb.FINISH_NONE)
        if choice.has_delta:
            taken += choice.take().token_ids
    choice.push([END], [], pb.FINISH_STOP)
    assert [*taken, *choice.take().token_ids] == [*ids, END]
