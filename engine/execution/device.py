"""The device that was asked for, and what goes wrong with GPUs, in one sentence."""

import contextlib
from collections.abc import Iterator

import torch

from cpd.common.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device of that name, or with `auto` a GPU if there is one.

    Raises:
        ConfigError: There is none, or torch can't use those that there are.
    """
    if name == "cpu" or torch.cuda.is_available():
        return torch.device("cpu" if name == "cpu" else "cuda")
    gpus = torch.cuda.device_count()
    if name == "auto" and not gpus:
        return torch.device("cpu")
    here = f"{gpus} GPUs are here, but torch {torch.__version__} can't use them" if gpus else "there is no GPU here"
    raise ConfigError(f"--device {name}: {here}: {_no_cuda()}; use --device cpu to go without")


@contextlib.contextmanager
def gpu_errors_said() -> Iterator[None]:
    """Around what loads a model: what CUDA refuses becomes a sentence.

    Raises:
        ConfigError: The GPU's memory is too small or in use, or the GPU does not work.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory does not hold weights, KV pool and what computes beside them; lower --gpu-memory or "
            f"--kv-memory, or --max-num-seqs and --token-budget ({_first_line(error)})"
        ) from error
    except torch.AcceleratorError as error:
        raise ConfigError(f"the GPU does not work: {_first_line(error)}; see `nvidia-smi` and `dmesg`") from error


def _no_cuda() -> str:
    """Why torch has no GPU, as it says itself where it is made to use one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return _first_line(error)
    return "torch finds no GPU"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")
