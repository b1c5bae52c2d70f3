"""Finds the model, and refuses one that the settings cannot serve, before any process is started.

`python -m deploy.model DIR SETTINGS` checks in a process of its own, so that the caller need not load torch.
"""

import json
import subprocess
import sys
from pathlib import Path

from cpd.common.errors import CheckpointError, CPDError
from cpd.common.settings import ClusterSettings
from deploy.placement import sharing

_FILES = ["*.json", "*.safetensors", "*.jinja"]
_SECRETS = {"api_key", "redis_url"}


def resolve_model(model: str) -> Path:
    """Returns the checkpoint directory for `model`: a directory, or the download of a Hugging Face id.

    Raises:
        CheckpointError: There is no such directory, and the hub has no such model or cannot be reached.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"there is no checkpoint directory {model}")
    return _download(model)


def check_model(directory: Path, settings: ClusterSettings) -> str:
    """Runs `inspect_model` in another process, so that this one need not load torch.

    Returns:
        The device to run on.

    Raises:
        CheckpointError: The checkpoint cannot be served with these settings; the message says why.
    """
    checked = settings.model_dump_json(exclude=_SECRETS)
    command = [sys.executable, "-P", "-m", "deploy.model", str(directory), checked]
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
    """Checks configuration, tensor headers, tokenizer and chat template. Reads no weights.

    With a local Ray, it also checks this machine's device and memory. Simulated workers need no tensors.

    Returns:
        The device to run on: `cpu` or `cuda` with a local Ray, else the setting.

    Raises:
        CPDError: The checkpoint cannot be served with these settings.
    """
    import torch

    from cpd.performance.model import Profile
    from engine.execution.memory_limits import check_host_memory, check_memory, default_pool
    from engine.execution.memory_plan import count_slots, plan_memory
    from engine.execution.torch_device import explain_gpu_errors, resolve_device
    from engine.model.config import load_config
    from engine.model.weights import Checkpoint
    from router.text.text_files import load_text_files
    from simulated_workers.engine import count_pages

    load_text_files(directory)
    config = load_config(directory)
    if settings.simulate:
        count_pages(settings, Profile.load(settings.simulate), config)
        return "cpu"
    with Checkpoint(directory) as checkpoint:
        plan = plan_memory(config, checkpoint, dtype=settings.dtype, max_model_len=settings.max_model_len)
    if settings.host_kv_memory:
        count_slots(settings.host_kv_memory, plan.page_bytes)
    if settings.ray_address:
        if settings.kv_memory is not None:
            plan.in_pool(settings.kv_memory)
        return settings.device
    device = resolve_device(settings.device)
    workers = settings.prefill + settings.combined
    together = sharing(workers, torch.cuda.device_count()) if device.type == "cuda" else workers
    with explain_gpu_errors():
        if settings.kv_memory is None:
            kv_bytes = default_pool(device, plan.weight_bytes, plan.page_bytes, settings.gpu_memory / together)
        else:
            kv_bytes = int(settings.kv_memory)
        plan.in_pool(kv_bytes)
        check_memory(device, plan.weight_bytes, kv_bytes, together)
    taken_bytes = workers * (plan.weight_bytes + kv_bytes) if device.type == "cpu" else 0
    check_host_memory(settings.host_kv_memory, workers, taken_bytes)
    return device.type


if __name__ == "__main__":
    try:
        sys.stdout.write(inspect_model(Path(sys.argv[1]), ClusterSettings.load(json.loads(sys.argv[2]))))
    except CPDError as error:
        sys.exit(f"error: {error}")
