"""Turns `--device` into a torch device, and GPU errors into one sentence."""

import contextlib
from collections.abc import Iterator

import torch

from cpd.common.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Returns the named device; `auto` prefers a GPU.

    Raises:
        ConfigError: There is no such device, or torch can't use it.
    """
    if name == "cpu" or torch.cuda.is_available():
        return torch.device("cpu" if name == "cpu" else "cuda")
    gpus = torch.cuda.device_count()
    if name == "auto" and not gpus:
        return torch.device("cpu")
    found = f"torch {torch.__version__} can't use the {gpus} GPUs here" if gpus else "there is no GPU here"
    raise ConfigError(f"--device {name}: {found}: {_no_cuda()}; use --device cpu to run without a GPU")


@contextlib.contextmanager
def explain_gpu_errors() -> Iterator[None]:
    """Turns CUDA errors while a model loads into one sentence.

    Raises:
        ConfigError: The GPU's memory is too small or in use, or the GPU does not work.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory is too small for weights, KV pool and intermediate results; lower --gpu-memory or "
            f"--kv-memory, or --max-num-seqs and --token-budget ({_first_line(error)})"
        ) from error
    except torch.AcceleratorError as error:
        raise ConfigError(f"the GPU does not work: {_first_line(error)}; see `nvidia-smi` and `dmesg`") from error


def _no_cuda() -> str:
    """Returns torch's own reason for having no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return _first_line(error)
    return "torch finds no GPU"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")
