"""Prompts and conversations from files."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from bench.tokens import Texts
from bench.workloads.base import Message, Workload
from cpd.common.errors import ConfigError
from tests.bench.workloads.making import all_messages, tokens, workload

TALK = {
    "id": "a",
    "conversations": [
        {"from": "gpt", "value": "an answer to nobody"},
        {"from": "human", "value": "Where is the copper door?"},
        {"from": "gpt", "value": "At the end of the corridor."},
        {"from": "human", "value": "And its code?"},
        {"from": "gpt", "value": "4817"},
        {"from": "human", "value": "Thanks."},
    ],
}


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def read(path: Path, texts: Texts | None = None, seed: int = 0, **flags: Any) -> Workload:
    return workload(workload="jsonl", file=path, texts=texts, seed=seed, **flags)


def unsalted(text: str) -> str:
    salt, separator, rest = text.partition("\n\n")
    assert separator
    assert tokens(salt) == 16
    return rest


def test_prompts_come_in_the_files_order_with_their_output_lengths(tmp_path: Path) -> None:
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "one", "output_len": 7},
        {"prompt": "two", "max_tokens": 8},
        {"prompt": "three"},
    )
    made = read(path, output_len="99")
    assert made.size == 3
    turns = [made.session(index).turns[0] for index in range(3)]
    assert [unsalted(turn.text) for turn in turns] == ["one", "two", "three"]
    assert [turn.output_len for turn in turns] == [7, 8, 99]


def test_messages_before_the_last_one_open_the_session(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "How are you?"},
    ]
    session = read(write(tmp_path / "chats.jsonl", {"messages": chat, "max_tokens": 5})).session(0)
    system, *others = session.opening
    assert system.role == "system"
    assert unsalted(system.content) == "Be brief."
    assert others == [Message("user", "Hello"), Message("assistant", "Hi")]
    (turn,) = session.turns
    assert (turn.text, turn.output_len) == ("How are you?", 5)


def test_human_messages_are_turns_and_answers_give_their_lengths(tmp_path: Path) -> None:
    turns = read(write(tmp_path / "talks.jsonl", TALK), output_len="99").session(0).turns
    assert [unsalted(turns[0].text), *(turn.text for turn in turns[1:])] == [
        "Where is the copper door?",
        "And its code?",
        "Thanks.",
    ]
    assert [turn.output_len for turn in turns] == [tokens("At the end of the corridor."), tokens("4817"), 99]


def test_without_a_tokenizer_answers_have_the_set_length(tmp_path: Path) -> None:
    turns = read(write(tmp_path / "talks.jsonl", TALK), Texts.measured(1.0, 0), output_len="99").session(0).turns
    assert [turn.output_len for turn in turns] == [99, 99, 99]


def test_sharegpt_lists_are_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([TALK, {"conversations": []}, {"conversations": TALK["conversations"][:1]}, TALK]))
    made = read(path)
    assert made.size == 2, "conversations without a question are left out"
    assert made.session(0).turns == made.session(1).turns
    (tmp_path / "talks.jsonl").write_text(json.dumps(TALK))
    assert read(tmp_path / "talks.jsonl").session(0).turns == made.session(0).turns


def test_a_system_prompt_of_a_shared_conversation_opens_it(tmp_path: Path) -> None:
    said = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hello"}]
    session = read(write(tmp_path / "talks.jsonl", {"conversations": said})).session(0)
    assert [(message.role, unsalted(message.content)) for message in session.opening] == [("system", "Be brief.")]
    assert session.turns[0].text == "Hello"


def test_every_session_of_a_run_begins_with_words_of_its_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "one"}, {"prompt": "two"}, TALK)
    salts: list[str] = []
    for seed in range(20):
        made = read(path, seed=seed)
        of_run = {all_messages(made.session(index))[0].split("\n\n")[0] for index in range(3)}
        assert len(of_run) == 1
        salts.extend(of_run)
    assert len(set(salts)) == 20


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('{"text": "hello"}', "not an object with a prompt"),
        ("7", "not an object with a prompt"),
        ("{", "not JSON"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": ["a"]}', "prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "user"}]}', r"messages\.0\.content"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "last message"),
        ('{"conversations": [{"value": "hi"}]}', r"conversations\.0\.from"),
    ],
)
def test_an_entry_of_another_shape_is_named(tmp_path: Path, entry: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + entry + "\n")
    with pytest.raises(BenchError, match=rf"prompts\.jsonl:2: .*{says}"):
        read(path)


def test_an_entry_of_a_list_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text('[{"prompt": "fine"}, {}]')
    with pytest.raises(BenchError, match=r"sharegpt\.json: entry 2: "):
        read(path)
    path.write_text('[{"prompt": "fine"}')
    with pytest.raises(BenchError, match=r"sharegpt\.json: .*not JSON"):
        read(path)


def test_a_file_without_prompts_and_no_file_at_all_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BenchError, match="no prompts"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="--file"):
        workload(workload="jsonl")
