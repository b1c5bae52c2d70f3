"""Which GPU a worker gets from a real Ray that is told of GPUs that there are not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.raydir import clear_ray_dir, make_ray_dir

pytestmark = pytest.mark.e2e

PROGRAM = """
import json, sys, time
from deploy import session
from deploy.cluster import launched
from deploy.placement import bundles, gpu_share, local_resources
from deploy.processes import ProcessSpec

WORKERS, GPUS = 4, 2
TELL = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), file=sys.stderr, flush=True); sys.stdin.read()"

class Telling(ProcessSpec):
    def command(self, model, **flags):
        return [sys.executable, "-c", TELL]

connected = session._connected
session._connected = lambda namespace, **options: connected(namespace, num_gpus=GPUS, **options)
workers = [Telling(f"combined-{n}", "combined", ".", ()) for n in range(WORKERS)]
specs = [*workers, Telling("router-0", "router", ".", ())]
with session.local_ray("gpus", sys.argv[1], local_resources(specs)) as here:
    demands = bundles(specs, here.resources, gpu_share("cuda", WORKERS, here.gpus))
    with launched(specs, demands, cores_apart=False) as cluster:
        told = [None] * len(specs)
        while not all(told):
            told = [state.lines[0] if state and state.lines else seen for state, seen in zip(cluster.states(), told)]
            time.sleep(0.05)
        print(json.dumps(told))
"""


@pytest.fixture
def ray_dir() -> Iterator[str]:
    directory = make_ray_dir()
    yield f"{directory}/ray"
    clear_ray_dir(directory)


def test_workers_share_the_gpus_evenly_and_see_no_other(ray_dir: str) -> None:
    """Also where the environment tells Ray to leave that to its users."""
    told = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2,5"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, ray_dir],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    *workers, _ = json.loads(ran.stdout.splitlines()[-1])
    assert sorted(workers) == ["2", "2", "5", "5"]
