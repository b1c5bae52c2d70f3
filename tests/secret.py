"""Files with the secrets of test clusters."""

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

SECRET = "the secret of the tests"


@lru_cache
def secret_file(secret: str = SECRET) -> Path:
    """Returns a file with this secret, which exists as long as this process."""
    directory = Path(tempfile.mkdtemp(prefix="cpd-test-secret-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    file = directory / "secret"
    file.touch(mode=0o600)
    file.write_text(secret)
    return file
