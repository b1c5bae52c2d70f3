import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cpd.common.blocks import unpack_tokens
from cpd.common.errors import CheckpointError
from router.text.text_files import load_text_files


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that the test can change."""
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def _edit(file: Path, **fields: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | fields))


def test_the_default_name_is_the_name_of_the_directory(model_dir: Path) -> None:
    assert load_text_files(model_dir).name == "small-model"
    assert load_text_files(model_dir, "org/other").name == "org/other"


def test_eos_is_the_same_as_in_transformers_generate(copy: Path) -> None:
    assert load_text_files(copy).eos_ids == (1,)
    _edit(copy / "config.json", eos_token_id=[5, 6])
    assert load_text_files(copy).eos_ids == (5, 6)
    _edit(copy / "generation_config.json", eos_token_id=7)
    assert load_text_files(copy).eos_ids == (7,)


def test_the_tokenizers_eos_is_used_if_the_configurations_have_none(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert load_text_files(copy).eos_ids == (1,)
    _edit(copy / "tokenizer_config.json", eos_token=None)
    assert load_text_files(copy).eos_ids == ()


def test_a_base_model_has_no_template(copy: Path) -> None:
    (copy / "tokenizer_config.json").unlink()
    assert load_text_files(copy).template is None


async def test_tokens_that_only_the_configuration_declares_are_known(copy: Path) -> None:
    declared = {"400": {"content": "<think>", "special": False}, "401": {"content": "<|pad|>", "special": True}}
    _edit(
        copy / "tokenizer_config.json",
        added_tokens_decoder=declared,
        pad_token="<|pad|>",
        bos_token={"__type": "AddedToken", "content": "<|b|>", "special": True},
    )
    ours, theirs = load_text_files(copy), AutoTokenizer.from_pretrained(copy)
    text = "<|b|>a<think>b<|pad|><|end|>"
    ids = unpack_tokens(await ours.tokenizer.encode(text)).tolist()
    assert ids == theirs(text)["input_ids"]
    detokenizer = ours.tokenizer.vocabulary.detokenizer(b"")
    pieces = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]
    assert "".join(pieces) == theirs.decode(ids, skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "can't be read"),
        ("tokenizer_config.json", "{", "can't be read"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("config.json", "nonsense", "can't be read"),
    ],
)
def test_a_damaged_file_is_named(copy: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_text_files(copy)
    assert "\n" not in str(error.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_text_files(tmp_path / "nowhere")
