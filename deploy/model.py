"""Finding the model, and refusing one that can't be served before anything has been started.

`python -m deploy.model DIR` does the check in a process of its own, which spares the caller loading torch.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpd.config import EngineSettings
from cpd.errors import CheckpointError, CPDError

_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(model: str) -> Path:
    """The checkpoint directory that `model` names: the directory itself, or a download of that Hugging Face id.

    Raises:
        CheckpointError: There is no such directory, and the hub has no such model or can't be reached.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"there is no checkpoint directory {model}")
    return _download(model)


def check_model(directory: Path, settings: EngineSettings | None) -> None:
    """As `inspect_model`, in a process of its own: this one needs no torch.

    Args:
        settings: What the model is to be served with; None: it will not be computed.

    Raises:
        CheckpointError: The checkpoint can't be served with these settings; the message says why.
    """
    command = [sys.executable, "-P", "-m", "deploy.model", str(directory), json.dumps(settings and asked_of(settings))]
    check = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if check.returncode:
        lines = check.stderr.strip().splitlines() or ["the check of the checkpoint failed"]
        raise CheckpointError(lines[-1].removeprefix("error: "))


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a directory
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES))
    except HFValidationError:
        raise CheckpointError(
            f"'{repository}' is neither a directory nor the id of a Hugging Face model (such as Qwen/Qwen3-0.6B)"
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"the Hugging Face model {repository} is gated: accept its licence there and run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no directory {repository}, and no Hugging Face model of that name that you may read"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"there is no directory {repository}, and the Hugging Face model of that name can't be downloaded: {reason}"
        ) from None


def asked_of(settings: EngineSettings) -> dict[str, Any]:
    """What the settings ask of a checkpoint."""
    return {"dtype": settings.dtype, "kv_bytes": settings.kv_bytes, "max_model_len": settings.max_model_len}


def inspect_model(directory: Path, asked: dict[str, Any] | None) -> None:
    """Reads configuration, tensor headers, tokenizer and chat template, no weights.

    Args:
        asked: Of `asked_of`; None: the model may have no tensors.

    Raises:
        CPDError: The checkpoint can't be served like that.
    """
    from engine.config import load_config
    from engine.fit import fit
    from engine.weights import Checkpoint
    from router.checkpoint import load_checkpoint

    load_checkpoint(directory, served_name="")
    config = load_config(directory)
    if asked is not None:
        with Checkpoint(directory) as checkpoint:
            fit(config, checkpoint, **asked)


if __name__ == "__main__":
    try:
        inspect_model(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except CPDError as error:
        sys.exit(f"error: {error}")
