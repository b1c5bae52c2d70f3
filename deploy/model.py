"""Finds the model, and refuses one that the settings cannot serve, before any process is started.

`python -m deploy.model DIR SETTINGS WORKERS TAKEN` checks in a process of its own, so that the caller need not load
torch.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cpd.common.blocks import POOL_BYTES
from cpd.common.errors import CheckpointError, ConfigError, CPDError
from cpd.common.settings import NO_SHARED_GPU, ClusterSettings
from deploy.gguf_model import directory_of
from deploy.placement import sharing

_FILES = ["*.json", "*.safetensors", "*.jinja"]
_OTHER_FORMATS = ["consolidated*", "original/*"]
"""Weights that some repositories have a second time, in their makers' own formats."""

_SECRETS = {"api_key", "redis_url"}


def resolve_model(model: str) -> Path:
    """Returns the checkpoint directory for `model`: a directory, that of a GGUF file, or the download of an id.

    Raises:
        CheckpointError: There is no such directory, and the hub has no such model or cannot be reached; or a directory
            has GGUF files instead of a checkpoint.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        found = sorted(path.name for path in directory.glob("*.gguf"))
        if found and not (directory / "tokenizer.json").exists():
            raise CheckpointError(
                f"{directory} is a directory of GGUF files; give the path of one of them: {', '.join(found)}"
            )
        return directory.resolve()
    if directory.suffix == ".gguf" and directory.is_file():
        return directory_of(directory)
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"there is no checkpoint directory {model}")
    return _download(model)


def check_models(models: Sequence[ClusterSettings], *, running: bool = False) -> str:
    """Checks all models of a cluster, and whether their workers fit on this machine together.

    On a shared device each of them must fit beside the popular ones.

    Args:
        models: The settings of each one's workers.
        running: The cluster runs already: this machine's free memory says nothing, since the workers have the rest.

    Returns:
        The device to run on.

    Raises:
        CheckpointError: One can't be served with its settings; the message says why.
        ConfigError: Some can't be on a shared device together.
    """
    workers = sum(one.combined + one.prefill for one in models)
    device, taken = "", 0
    awake: list[tuple[ClusterSettings, int]] = []
    for one in models:
        checked = one.model_copy(update={"ray_address": one.ray_address or "auto"}) if running else one
        try:
            device, more = _check(resolve_model(one.model), checked, workers, taken)
        except CheckpointError as error:
            raise CheckpointError(f"{one.served_model_name}: {error}" if len(models) > 1 else str(error)) from None
        awake.append((one, more))
        if one.device_memory is None:
            taken += more
    check_popular(awake)
    return device


def check_popular(awake: Sequence[tuple[ClusterSettings, int]]) -> None:
    """Checks that popular models fit on a shared device together, and leave room for each other one.

    Args:
        awake: The settings of each model's workers, and the memory that one of them takes while it is awake.

    Raises:
        ConfigError: They don't.
    """
    popular = [(one, size) for one, size in awake if one.fairness.popular]
    for one, size in awake:
        total = one.device_memory
        if total is None or one.ray_address or not popular:
            continue
        held = sum(each.combined * taken for each, taken in popular)
        names = ", ".join(f"{each.served_model_name} {_gib(each.combined * taken)}" for each, taken in popular)
        if held > total:
            raise ConfigError(
                f"popular models take {_gib(held)} together ({names}), and --device-memory is {_gib(total)}: "
                "nobody may displace them, so fewer can be popular"
            )
        if not one.fairness.popular and held + size > total:
            raise ConfigError(
                f"{one.served_model_name} takes {_gib(size)} while it is awake, and popular models ({names}) "
                f"leave {_gib(total - held)} of --device-memory: it could never be awake"
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def check_model(directory: Path, settings: ClusterSettings) -> str:
    """Checks the only model of a cluster, as `check_models`."""
    return _check(directory, settings, settings.combined + settings.prefill, 0)[0]


def _check(directory: Path, settings: ClusterSettings, workers: int, taken_bytes: int) -> tuple[str, int]:
    """Runs `inspect_model` in another process, so that this one need not load torch. Returns what it returns."""
    checked = settings.model_dump_json(exclude=_SECRETS)
    command = [sys.executable, "-P", "-m", "deploy.model", str(directory), checked, str(workers), str(taken_bytes)]
    check = subprocess.run(command, capture_output=True, text=True)
    if check.returncode:
        lines = check.stderr.strip().splitlines() or ["the check of the checkpoint failed"]
        raise CheckpointError(lines[-1].removeprefix("error: "))
    device, taken = check.stdout.split()[-2:]
    return device, int(taken)


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
        return Path(snapshot_download(repository, allow_patterns=_FILES, ignore_patterns=_OTHER_FORMATS))
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


def inspect_model(directory: Path, settings: ClusterSettings, workers: int, taken_bytes: int) -> tuple[str, int]:
    """Checks configuration, tensor headers, tokenizer and chat template. Reads no weights.

    With a local Ray, it also checks this machine's device and memory. Simulated workers need no tensors.

    Args:
        workers: Number of workers of all models, which share the GPUs.
        taken_bytes: Memory that the workers of other models take, without GPUs.

    Returns:
        The device to run on (`cpu` or `cuda` with a local Ray, else the setting), and the memory that these workers
        take, if it is the host's; on a shared device, what one of them takes while it is awake.

    Raises:
        CPDError: The checkpoint cannot be served with these settings.
    """
    import torch

    from cpd.performance.model import Profile
    from engine.execution.memory_limits import check_host_memory, check_memory, check_shared_memory, default_pool
    from engine.execution.memory_plan import count_slots, plan_memory
    from engine.execution.torch_device import explain_gpu_errors, resolve_device
    from engine.model.checkpoint import open_checkpoint
    from engine.model.config import load_config
    from router.text.text_files import load_text_files
    from simulated_workers.engine import count_pages

    load_text_files(directory)
    config = load_config(directory)
    if settings.simulate:
        count_pages(settings, Profile.load(settings.simulate), config)
        return "cpu", 0
    with open_checkpoint(directory, config) as checkpoint:
        plan = plan_memory(
            config,
            checkpoint,
            dtype=settings.dtype,
            quantization=settings.quantization,
            kv_dtype=settings.kv_dtype,
            max_model_len=settings.max_model_len,
        )
    if settings.host_kv_memory:
        count_slots(settings.host_kv_memory, plan.page_bytes)
    own = settings.prefill + settings.combined
    if settings.device_memory is not None:
        pool = POOL_BYTES if settings.kv_memory is None else int(settings.kv_memory)
        plan.in_pool(pool)
        awake = plan.weight_bytes + pool
        if awake > settings.device_memory:
            raise ConfigError(
                f"the model could never be awake: weights of {_gib(plan.weight_bytes)} and a KV pool of {_gib(pool)} "
                f"do not fit into --device-memory, which is {_gib(settings.device_memory)}; lower --kv-memory"
            )
        if settings.ray_address:
            return settings.device, awake
        if resolve_device(settings.device).type == "cuda":
            raise ConfigError(NO_SHARED_GPU)
        shared = settings.device_memory + settings.staging_memory
        check_shared_memory(shared)
        check_host_memory(settings.host_kv_memory, own, shared)
        return "cpu", awake
    if settings.ray_address:
        if settings.kv_memory is not None:
            plan.in_pool(settings.kv_memory)
        return settings.device, 0
    device = resolve_device(settings.device)
    plan.check_device(device)
    on_gpu = device.type == "cuda"
    together = sharing(workers, torch.cuda.device_count()) if on_gpu else own
    with explain_gpu_errors():
        if settings.kv_memory is None:
            kv_bytes = default_pool(device, plan.weight_bytes, plan.page_bytes, settings.gpu_memory / together)
        else:
            kv_bytes = int(settings.kv_memory)
        plan.in_pool(kv_bytes)
        check_memory(device, plan.weight_bytes, kv_bytes, together, 0 if on_gpu else taken_bytes)
    pools = 0 if on_gpu else own * (plan.weight_bytes + kv_bytes)
    check_host_memory(settings.host_kv_memory, own, taken_bytes + pools)
    return device.type, pools + own * settings.host_kv_memory


if __name__ == "__main__":
    try:
        checked = ClusterSettings.load(json.loads(sys.argv[2]))
        sys.stdout.write("{} {}".format(*inspect_model(Path(sys.argv[1]), checked, *map(int, sys.argv[3:]))))
    except CPDError as error:
        sys.exit(f"error: {error}")
