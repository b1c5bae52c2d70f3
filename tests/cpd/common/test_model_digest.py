from pathlib import Path

import pytest

from cpd.common.errors import CheckpointError
from cpd.common.model_digest import model_digest

FILES = {"config.json": "{}", "tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}"}


def _checkpoint(directory: Path, **changed: str) -> Path:
    directory.mkdir()
    for name, content in FILES.items():
        (directory / name).write_text(changed.get(name.split(".")[0], content))
    (directory / "README.md").write_text(directory.name)
    return directory


@pytest.mark.parametrize("file", ["config", "tokenizer", "tokenizer_config", "chat_template"])
def test_each_file_of_the_text_counts_and_no_other(tmp_path: Path, file: str) -> None:
    digest = model_digest(_checkpoint(tmp_path / "one"))
    assert digest == model_digest(_checkpoint(tmp_path / "same"))
    assert digest != model_digest(_checkpoint(tmp_path / "changed", **{file: "changed"}))


def test_text_that_moves_from_one_file_to_the_next_is_a_difference(tmp_path: Path) -> None:
    one = _checkpoint(tmp_path / "one", config="{}", tokenizer="{} ")
    other = _checkpoint(tmp_path / "other", config="{} ", tokenizer="{}")
    assert model_digest(one) != model_digest(other)


def test_a_checkpoint_without_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_digest(tmp_path) == b""


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    directory = _checkpoint(tmp_path / "one")
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="can't be read"):
        model_digest(directory)
