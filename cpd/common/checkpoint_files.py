"""The small JSON files of a checkpoint, which routers and workers must read in the same way."""

from pathlib import Path
from typing import Any

import orjson

from cpd.common.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """Reads the JSON object in `file`. Returns an empty one if there is no such file.

    Raises:
        CheckpointError: The file can't be read, or has no object.
    """
    try:
        data = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return data


def eos_ids(model_dir: Path) -> tuple[int, ...]:
    """Reads the end-of-sequence tokens from generation_config.json, else config.json, like transformers' `generate`.

    Returns:
        An empty tuple if neither has any.

    Raises:
        CheckpointError: A file can't be read.
    """
    for name in ("generation_config.json", "config.json"):
        match read_json(model_dir / name).get("eos_token_id"):
            case int(token_id):
                return (token_id,)
            case [*token_ids] if token_ids:
                return tuple(int(token_id) for token_id in token_ids)
    return ()
