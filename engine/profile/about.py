"""What a profile says of itself."""

import platform
from pathlib import Path
from typing import Any

import torch

from engine.execution.cpu.lanes import own_cores

SM_STEP = 8
"""Partitions of a GPU of compute capability 9.0 have a multiple of so many SMs."""


def about(model_dir: Path, dtype: str, device: torch.device) -> dict[str, Any]:
    """The fields of a profile (`cpd.performance.model.Profile`) that name what is measured: model, device, units."""
    return {"model": f"{model_dir.name}, {dtype}", **_about_device(device)}


def _about_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "units": properties.multi_processor_count, "unit_step": SM_STEP}
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            name = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), name)
    except OSError:
        pass
    return {"device": name, "units": own_cores(), "unit_step": 1}
