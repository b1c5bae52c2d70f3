"""Ties a router's text to the workers' tokens: both digest the files of their own checkpoint."""

from hashlib import blake2b
from pathlib import Path

from cpd.common.errors import CheckpointError

_TOKENIZER = "tokenizer.json"
_FILES = ("config.json", _TOKENIZER, "tokenizer_config.json", "chat_template.jinja")


def model_digest(model_dir: Path) -> bytes:
    """Digests the model's config, tokenizer and chat template (16 bytes).

    Returns:
        An empty digest if the checkpoint has no tokenizer; workers can do without.

    Raises:
        CheckpointError: A file can't be read.
    """
    if not (model_dir / _TOKENIZER).is_file():
        return b""
    digest = blake2b(digest_size=16)
    for name in _FILES:
        try:
            content = (model_dir / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CheckpointError(f"{model_dir / name} can't be read: {error.strerror}") from None
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()
