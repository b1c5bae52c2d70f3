"""What the router needs of a checkpoint directory: tokenizer, chat template, how to sample, and what ends an output."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from cpd.config import SamplingDefaults
from cpd.errors import CheckpointError
from router.detokenize import Vocabulary
from router.schemas import SAMPLING, GenerateRequest
from router.template import ChatTemplate, read_template
from router.tokenizer import Tokenizer, load_tokenizer, special_tokens


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as the router knows it.

    Attributes:
        name: Its name in the API.
        template: None for a base model, which has no chat.
        eos_ids: Tokens that end an output.
        sampling: Fields of requests that leave them out; for others OpenAI's defaults hold.
    """

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    sampling: Mapping[str, float]


def load_checkpoint(model_dir: Path, served_name: str = "", sampling: SamplingDefaults = "model") -> Checkpoint:
    """Reads the small files of a checkpoint.

    Args:
        model_dir: With tokenizer.json; tokenizer_config.json, config.json and generation_config.json where there are.
        served_name: Name in the API; empty takes the directory's.
        sampling: Whose defaults hold.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    if not model_dir.is_dir():
        raise CheckpointError(
            f"the model directory {model_dir} does not exist; pass --model with a checkpoint directory"
        )
    config = _read_json(model_dir / "tokenizer_config.json")
    tokenizer = load_tokenizer(model_dir, config)
    source = read_template(model_dir, config)
    return Checkpoint(
        name=served_name or model_dir.resolve().name,
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer.backend),
        template=ChatTemplate(source, special_tokens(config)) if source is not None else None,
        eos_ids=_eos_ids(model_dir, config, tokenizer),
        sampling=default_sampling(model_dir, sampling),
    )


def _eos_ids(model_dir: Path, tokenizer_config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """As transformers' `generate`: generation_config.json decides, else config.json; else the tokenizer's EOS."""
    for file in ("generation_config.json", "config.json"):
        match _read_json(model_dir / file).get("eos_token_id"):
            case int(token_id):
                return (token_id,)
            case [*token_ids] if token_ids:
                return tuple(int(token_id) for token_id in token_ids)
    text = special_tokens(tokenizer_config).get("eos_token")
    found = tokenizer.backend.token_to_id(text) if text is not None else None
    return (found,) if found is not None else ()


def default_sampling(model_dir: Path, whose: SamplingDefaults) -> dict[str, float]:
    """What differs from OpenAI's defaults: what its authors would have the model sampled with, as its
    generation_config.json says. As in vLLM and SGLang `do_sample` makes no difference.

    Raises:
        CheckpointError: No request could ask for that.
    """
    if whose == "openai":
        return {}
    file = model_dir / "generation_config.json"
    said = _read_json(file)
    sampling = {name: said[name] for name in SAMPLING if said.get(name) is not None}
    try:
        GenerateRequest.model_validate({"model": "", **sampling})
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0])
        reason = f"{file}: {name} is {sampling[name]!r}: {wrong['msg']}"
        raise CheckpointError(f"{reason}; mend it, or start with --sampling-defaults openai") from None
    return sampling


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty where there is no such file."""
    try:
        data = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return data
