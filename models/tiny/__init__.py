"""The bundled checkpoint, which `cpd up` serves by default."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""A Qwen3 checkpoint directory: config.json, model.safetensors, tokenizer.json, …"""

NAME = "cpd-tiny"
"""Its name in the API."""
