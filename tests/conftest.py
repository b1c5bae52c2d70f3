"""Fixtures that several packages' tests share."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read when torch is first imported. Idle threads that spin would starve other processes on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Read when grpc is first imported. Its fork handlers crash children that are forked while it is in use.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Read when triton is first imported: without a GPU its kernels are interpreted.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no bug: no example has a deadline.
settings.register_profile("cpd", deadline=None)
settings.load_profile("cpd")

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`checkpoint(family, **overrides)`: see tests/checkpoints.py. Made once a session; don't write into it."""
    from transformers.utils import logging

    from tests.checkpoints import make_checkpoint

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def get(family: str, **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            made[key] = make_checkpoint(root / f"{family}-{len(made)}", family, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis server. Tests that share it keep apart by the cluster's name."""
    from deploy.redis import embedded_redis

    # Not under tmp_path: a socket's name has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="cpd-redis-") as directory, embedded_redis(Path(directory) / "r") as redis:
        yield redis.url
