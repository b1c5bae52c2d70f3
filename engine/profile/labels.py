"""Labels of a profile: which model was measured, on which device."""

import platform
from pathlib import Path
from typing import Any

import torch

from engine.execution.cpu.lanes import own_cores

SM_STEP = 8
"""SM partitions of a GPU of compute capability 9.0 are multiples of this."""


def profile_labels(model_dir: Path, dtype: str, device: torch.device) -> dict[str, Any]:
    """Returns the fields of `cpd.performance.model.Profile` that describe model, device and units."""
    return {"model": f"{model_dir.name}, {dtype}", **_device_labels(device)}


def _device_labels(device: torch.device) -> dict[str, Any]:
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
