"""Reads the parts of a checkpoint that the router needs: tokenizer, chat template, end-of-sequence tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpd.common import checkpoint_files
from cpd.common.checkpoint_files import read_json
from cpd.common.errors import CheckpointError
from router.text.fair_threads import FairThreads
from router.text.template import ChatTemplate, read_template
from router.text.tokenizer import Tokenizer, load_tokenizer, special_tokens


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The parts of a model that the router needs.

    Attributes:
        name: The model's name in the API.
        template: The chat template; None for a base model.
        tool_template: The chat template for chats with tools, often the same one.
        eos_ids: Tokens that end an output.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_template: ChatTemplate | None
    eos_ids: tuple[int, ...]


def load_text_files(model_dir: Path, served_name: str = "", threads: FairThreads | None = None) -> TextFiles:
    """Reads the files of a checkpoint that deal with text.

    Args:
        model_dir: Has tokenizer.json, and may have tokenizer_config.json, config.json and generation_config.json.
        served_name: The model's name in the API; empty for the directory's name.
        threads: Do the work on long texts; None for new ones.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    if not model_dir.is_dir():
        raise CheckpointError(
            f"the model directory {model_dir} does not exist; pass --model with a checkpoint directory"
        )
    config = read_json(model_dir / "tokenizer_config.json")
    tokenizer = load_tokenizer(model_dir, config, threads)
    source, tool_source = read_template(model_dir, config), read_template(model_dir, config, for_tools=True)
    template = ChatTemplate(source, special_tokens(config)) if source is not None else None
    tool_template = template
    if tool_source is not None and tool_source != source:
        tool_template = ChatTemplate(tool_source, special_tokens(config))
    return TextFiles(
        name=served_name or model_dir.resolve().name,
        tokenizer=tokenizer,
        template=template,
        tool_template=tool_template,
        eos_ids=_eos_ids(model_dir, config, tokenizer),
    )


def _eos_ids(model_dir: Path, tokenizer_config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Reads the end-of-sequence tokens of the model's configuration, else that of the tokenizer."""
    if found := checkpoint_files.eos_ids(model_dir):
        return found
    text = special_tokens(tokenizer_config).get("eos_token")
    token_id = tokenizer.token_id(text) if text is not None else None
    return (token_id,) if token_id is not None else ()
