"""Checkpoints of models that call tools and reason, for a router's tests."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.router.text.test_template import TEMPLATES

MODEL = "tool-model"
QUESTION: Any = [{"role": "user", "content": "How is it?"}]
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]")


def make_tool_model(
    source: Path, directory: Path, template: str, markers: tuple[str, ...] = MARKERS
) -> tuple[Tokenizer, int]:
    """Copies a checkpoint to `directory`, and gives it a chat template and markers.

    Args:
        template: Name of one of TEMPLATES, or the source of another.
        markers: These are special tokens of the model.

    Returns:
        The tokenizer and the end-of-sequence token.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(list(markers))
    tokenizer.save(str(directory / "tokenizer.json"))
    text = next((path.read_text() for path in TEMPLATES if path.stem == template), template)
    special = {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": text}))
    return tokenizer, tokenizer.encode("<|end|>").ids[0]
