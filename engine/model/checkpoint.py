"""Opens the weights of a model, in whichever format they are."""

from pathlib import Path

from engine.model.compressed_tensors import CompressedCheckpoint
from engine.model.config import ModelConfig
from engine.model.gguf_file import GGUF_FILE
from engine.model.gguf_weights import GgufCheckpoint
from engine.model.weights import Checkpoint


def open_checkpoint(model_dir: Path, config: ModelConfig) -> Checkpoint:
    """Opens the weights in a directory and reads their headers.

    Args:
        config: As `load_config` returned it.

    Raises:
        CheckpointError: A file is missing, truncated or damaged.
    """
    if (file := model_dir / GGUF_FILE).exists():
        return GgufCheckpoint(file, config)
    return Checkpoint(model_dir) if config.scheme is None else CompressedCheckpoint(model_dir, config.scheme)
