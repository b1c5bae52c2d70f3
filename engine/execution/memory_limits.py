"""Checks that weights and pages fit into the memory that a device has left."""

import os
from pathlib import Path

import torch

from cpd.common.blocks import POOL_BYTES
from cpd.common.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")

_WORK_BYTES = 5 << 30
"""GPU memory left free for a step's intermediate results, graphs and libraries: 4.9 GiB on an H200 with lanes."""

_MAX_PAGES = 1 << 18
"""Largest default pool, 4 M tokens: a small model does not need all memory of a large GPU."""

_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For cgroup versions 2 and 1: folder, limit, usage, and the part of the usage that is inactive file cache, which the
kernel frees first. https://docs.kernel.org/admin-guide/cgroup-v2.html"""


def default_pool(device: torch.device, weight_bytes: int, page_bytes: int, gpu_memory: float) -> int:
    """Returns the bytes of a KV pool for which no size is given.

    Args:
        gpu_memory: Share of a GPU's memory for weights, pool and intermediate results together.

    Raises:
        ConfigError: The weights leave no room for a page.
    """
    if device.type != "cuda":
        return POOL_BYTES
    total = torch.cuda.mem_get_info(device)[1]
    left = int(total * gpu_memory) - weight_bytes - _WORK_BYTES
    if left < page_bytes:
        raise ConfigError(
            f"weights of {weight_bytes / 2**30:.1f} GiB and {_WORK_BYTES >> 30} GiB for intermediate results leave no "
            f"room for KV pages in {gpu_memory:.0%} of the GPU's {total / 2**30:.1f} GiB; raise --gpu-memory, start "
            "fewer workers on the GPU, or use a smaller model"
        )
    return min(left, _MAX_PAGES * page_bytes)


def check_memory(
    device: torch.device, weight_bytes: int, kv_bytes: int, workers: int = 1, taken_bytes: int = 0
) -> None:
    """Raises ConfigError if the device has too little free memory, less `taken_bytes`, for the weights and pools of the
    workers."""
    available = available_memory(device)
    if available is not None and workers * (weight_bytes + kv_bytes) > (available := max(0, available - taken_bytes)):
        gib = [round(size / 2**30, 1) for size in (weight_bytes, kv_bytes, available)]
        gpu, setting = "", "--kv-memory"
        if device.type == "cuda":
            number = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
            size_gib = torch.cuda.mem_get_info(device)[1] / 2**30
            gpu = f" of GPU {number}, which has {size_gib:.1f} GiB (CUDA_VISIBLE_DEVICES chooses others)"
            setting = "--gpu-memory or --kv-memory"
        times, fewer = _per_worker(workers)
        raise ConfigError(
            f"weights of {gib[0]} GiB and a KV pool of {gib[1]} GiB{times} do not fit into the {gib[2]} GiB of free "
            f"memory{gpu}; lower {setting}{fewer} or use a smaller model"
        )


def check_shared_memory(shared_bytes: int) -> None:
    """Raises ConfigError if the host has less free memory than models are to share, staged copies included."""
    available = available_memory(torch.device("cpu"))
    if available is not None and shared_bytes > available:
        raise ConfigError(
            f"--device-memory and --staging-memory are {shared_bytes / 2**30:.1f} GiB together, and "
            f"{available / 2**30:.1f} GiB of memory are free; lower them"
        )


def check_host_memory(host_bytes: int, workers: int = 1, taken_bytes: int = 0) -> None:
    """Raises ConfigError if the host's free memory, less `taken_bytes`, is too small for the pages of the workers."""
    available = available_memory(torch.device("cpu"))
    if available is not None and workers * host_bytes > (left := max(0, available - taken_bytes)):
        times, fewer = _per_worker(workers)
        raise ConfigError(
            f"{host_bytes / 2**30:.1f} GiB of host memory for KV pages{times} do not fit into the {left / 2**30:.1f} "
            f"GiB of memory that are left; lower --host-kv-memory{fewer}"
        )


def _per_worker(workers: int) -> tuple[str, str]:
    return (f" for each of {workers} workers", ", start fewer workers") if workers > 1 else ("", "")


def available_memory(device: torch.device) -> int | None:
    """Returns the bytes available without swapping and within a container's limit; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min((left for left in (_left_in_system(), *map(_left_in_group, _CGROUPS)) if left is not None), default=None)


def _left_in_system() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def _left_in_group(group: tuple[Path, str, str, str]) -> int | None:
    """Returns the bytes left to a container; None if it has no limit."""
    folder, limit, used, idle = group
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int((folder / limit).read_text()) - int((folder / used).read_text()) + int(stat[idle])
    except (OSError, KeyError, ValueError):  # version 2 has "max" for no limit
        return None
