"""How a real Ray assigns GPUs to workers. It is told of GPUs that the machine does not have."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.raydir import clear_ray_dir, make_ray_dir
from tests.secret import secret_file

pytestmark = pytest.mark.e2e

REPORT = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), file=sys.stderr, flush=True); sys.stdin.read()"
"""What runs instead of a worker or router."""

PROGRAM = """
import json, sys, time
from pathlib import Path
from cpd.common.trust import read_secret
from deploy import session
from deploy.cluster import launched
from deploy.placement import demand_of, gpu_share, local_resources
from deploy.processes import ProcessSpec
from deploy.sealed import seal

WORKERS, GPUS = 4, 2
connected = session._connected
session._connected = lambda namespace, **options: connected(namespace, num_gpus=GPUS, **options)
file = sys.argv[2]
flags, sealed = {"secret_file": file, "port": "0"}, seal(read_secret(Path(file)), {})
workers = [ProcessSpec(f"combined-{n}", "combined", ".", (), flags, sealed) for n in range(WORKERS)]
specs = [*workers, ProcessSpec("router-0", "router", ".", (), flags, sealed)]
with session.local_ray("gpus", sys.argv[1], local_resources()) as here:
    share = gpu_share("cuda", WORKERS, here.gpus)
    with launched(specs, lambda spec: demand_of(spec, here.resources, share), False, print) as cluster:
        reported = [None] * len(specs)
        while not all(reported):
            states = cluster.states()
            lines = [states[spec.name].lines if states.get(spec.name) else None for spec in specs]
            lines = [line and line[0] for line in lines]
            reported = [line or seen for line, seen in zip(lines, reported)]
            time.sleep(0.05)
        print(json.dumps(reported))
"""


@pytest.fixture
def ray_dir() -> Iterator[str]:
    directory = make_ray_dir()
    yield f"{directory}/ray"
    clear_ray_dir(directory)


def test_workers_share_gpus_evenly_and_see_only_their_own(ray_dir: str, tmp_path: Path) -> None:
    """Even if the environment tells Ray not to set CUDA_VISIBLE_DEVICES."""
    for module in ("decode_worker", "router"):
        (tmp_path / f"{module}.py").write_text(REPORT)
    environment = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": "2,5",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, ray_dir, str(secret_file())],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    *workers, _ = json.loads(ran.stdout.splitlines()[-1])
    assert sorted(workers) == ["2", "2", "5", "5"]
