"""The bundled checkpoint that `cpd up` serves when no model is named."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""A Qwen3 checkpoint directory: config.json, model.safetensors, tokenizer.json, …"""

NAME = "cpd-tiny"
"""Its name in the API."""
