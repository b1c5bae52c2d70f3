"""Finding the model, and refusing one that can't be served with the settings before anything has been started.

`python -m deploy.model DIR` does the check in a process of its own, which spares the caller loading torch.
"""

import json
import subprocess
import sys
from pathlib import Path

from cpd.common.config import ClusterSettings
from cpd.common.errors import CheckpointError, CPDError
from deploy.placement import sharing

_FILES = ["*.json", "*.safetensors", "*.jinja"]
_ASKED = {
    "simulate",
    "dtype",
    "device",
    "kv_memory",
    "gpu_memory",
    "host_kv_memory",
    "max_model_len",
    "ray_address",
    "prefill",
    "combined",
}
"""What there is to check about a model's settings."""


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


def check_model(directory: Path, settings: ClusterSettings) -> str:
    """As `inspect_model`, in a process of its own: this one needs no torch.

    Returns:
        The device to run on.

    Raises:
        CheckpointError: The checkpoint can't be served with these settings; the message says why.
    """
    asked = settings.model_dump_json(include=_ASKED)
    command = [sys.executable, "-P", "-m", "deploy.model", str(directory), asked]
    check = subprocess.run(command, capture_output=True, text=True)
    if check.returncode:
        lines = check.stderr.strip().splitlines() or ["the check of the checkpoint failed"]
        raise CheckpointError(lines[-1].removeprefix("error: "))
    return check.stdout.split()[-1]


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


def inspect_model(directory: Path, settings: ClusterSettings) -> str:
    """Reads configuration, tensor headers, tokenizer and chat template, no weights; simulated workers need no tensors.

    A local Ray's workers will have this machine, of which their device and its memory are known, too.

    Returns:
        The device to run on: of a local Ray's workers `cpu` or `cuda`, else as the settings say.

    Raises:
        CPDError: The checkpoint can't be served with these settings.
    """
    import torch

    from engine.execution.device import gpu_errors_said, resolve_device
    from engine.execution.memory_limits import check_host_memory, check_memory, default_pool
    from engine.execution.memory_plan import count_slots, fit
    from engine.model.config import load_config
    from engine.model.weights import Checkpoint
    from router.text.checkpoint import load_checkpoint
    from simulated_workers.engine import count_pages
    from simulated_workers.simulation import read_profile

    load_checkpoint(directory)
    config = load_config(directory)
    if settings.simulate:
        count_pages(settings, read_profile(settings.simulate), config)
        return "cpu"
    with Checkpoint(directory) as checkpoint:
        fitted = fit(config, checkpoint, dtype=settings.dtype, max_model_len=settings.max_model_len)
    if settings.host_kv_memory:
        count_slots(settings.host_kv_memory, fitted.page_bytes)
    if settings.ray_address:
        if settings.kv_memory is not None:
            fitted.in_pool(settings.kv_memory)
        return settings.device
    device = resolve_device(settings.device)
    workers = settings.prefill + settings.combined
    together = sharing(workers, torch.cuda.device_count()) if device.type == "cuda" else workers
    with gpu_errors_said():
        if settings.kv_memory is None:
            kv_bytes = default_pool(device, fitted.weight_bytes, fitted.page_bytes, settings.gpu_memory / together)
        else:
            kv_bytes = int(settings.kv_memory)
        fitted.in_pool(kv_bytes)
        check_memory(device, fitted.weight_bytes, kv_bytes, together)
    taken_bytes = workers * (fitted.weight_bytes + kv_bytes) if device.type == "cpu" else 0
    check_host_memory(settings.host_kv_memory, workers, taken_bytes)
    return device.type


if __name__ == "__main__":
    try:
        sys.stdout.write(inspect_model(Path(sys.argv[1]), ClusterSettings.load(json.loads(sys.argv[2]))))
    except CPDError as error:
        sys.exit(f"error: {error}")
