"""Fixtures for the tests of all packages."""

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

# Read at torch's first import. Idle threads that spin would starve other processes on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Read at grpc's first import. Its fork handlers crash children that are forked while it is in use.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Read at triton's first import. Without a GPU its kernels are interpreted.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell makes background jobs and their children ignore SIGINT; the tests send it to processes they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a deadline per example: a loaded machine is not a bug.
settings.register_profile("cpd", deadline=None)
settings.load_profile("cpd")

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`checkpoint(family, **overrides)` returns a checkpoint of `make_checkpoint`, made once a session. Read-only."""
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
    """A real Redis server, shared by all tests; each uses a cluster name of its own."""
    from deploy.redis import embedded_redis

    # Not under tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="cpd-redis-") as directory, embedded_redis(Path(directory) / "r") as redis:
        yield redis.url
