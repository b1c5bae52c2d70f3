"""Replay of traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from cpd.common.errors import ConfigError
from tests.bench.workloads.making import OVERHEAD, common_tokens, first_texts, prompt_len, workload


def line(at_ms: float, input_len: int, hash_ids: list[int], output_len: int = 10) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": input_len, "output_length": output_len, "hash_ids": hash_ids}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two requests that share two blocks, one that shares one with them, and one that shares nothing."""
    path = tmp_path / "trace.jsonl"
    rows = [
        line(3000, 1500, [1, 2, 3], output_len=30),
        line(27_000, 1300, [1, 2, 4]),
        line(30_000, 2000, [1, 5, 6, 7]),
        line(33_000, 100, [8]),
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_prompts_have_the_traced_lengths(file: Path) -> None:
    made = workload(workload="trace", file=file)
    assert made.size == 4
    assert [prompt_len(text) for text in first_texts(made, 4)] == [1500, 1300, 2000, 100]
    assert [made.session(index).turns[0].input_len for index in range(4)] == [1500, 1300, 2000, 100]
    assert [made.session(index).turns[0].output_len for index in range(4)] == [30, 10, 10, 10]


def test_prompts_share_what_the_traced_ones_shared(file: Path) -> None:
    one, two, three, four = first_texts(workload(workload="trace", file=file), 4)
    assert 1024 <= common_tokens(one, two) < 1024 + 8
    assert 512 <= common_tokens(one, three) < 512 + 8
    assert common_tokens(one, four) < 8


def test_times_count_from_the_first_request_and_can_run_faster(file: Path) -> None:
    assert workload(workload="trace", file=file).times_s == [0, 24, 27, 30]
    assert workload(workload="trace", file=file, speedup=10).times_s == pytest.approx([0, 2.4, 2.7, 3])


def test_requests_are_put_in_the_order_of_their_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line(at_ms, length, [])) for at_ms, length in [(2000, 20), (0, 30)]))
    made = workload(workload="trace", file=path)
    assert made.times_s == [0, 2]
    assert [made.session(index).turns[0].input_len for index in range(2)] == [30, 20]


def test_what_the_hashes_do_not_reach_to_is_a_text_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line(0, 700, ids)) for ids in ([1], [1], [], [])))
    one, two, three, four = texts = first_texts(workload(workload="trace", file=path), 4)
    assert [prompt_len(text) for text in texts] == [700] * 4
    assert 512 <= common_tokens(one, two) < 512 + 8
    assert common_tokens(three, four) < 8


def test_more_hashes_than_the_length_has_room_for_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line(0, 512 + OVERHEAD, [1, 2, 3, 4])))
    assert prompt_len(first_texts(workload(workload="trace", file=path), 1)[0]) == 512 + OVERHEAD


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("not json", "not JSON"),
        ("[1, 2]", "dictionary"),
        ("{}", "timestamp"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length"),
        ('{"timestamp": 1, "input_length": 1000000000000, "output_length": 1}', "input_length"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "not JSON"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "timestamp"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1, -2]}', r"hash_ids\.1"),
    ],
)
def test_an_unreadable_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(line(0, 10, [1])) + "\n\n" + bad + "\n")
    with pytest.raises(BenchError, match=rf"trace\.jsonl:3: .*{says}"):
        workload(workload="trace", file=path)


def test_a_compressed_file_is_to_be_unpacked_first(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line(0, 10, [1])).encode()))
    with pytest.raises(BenchError, match=r"trace\.jsonl\.gz is compressed: unpack it"):
        workload(workload="trace", file=path)


def test_a_missing_empty_or_unnamed_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nowhere\.jsonl: No such file"):
        workload(workload="trace", file=tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(BenchError, match="no requests"):
        workload(workload="trace", file=tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="--file"):
        workload(workload="trace")
