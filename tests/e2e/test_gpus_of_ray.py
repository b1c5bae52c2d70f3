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
import json, sys
from deploy import session
from deploy.placement import bundles, gpu_share, local_resources
from deploy.processes import ProcessSpec

WORKERS, GPUS = 6, 3
connected = session._connected
session._connected = lambda namespace, **options: connected(namespace, num_gpus=GPUS, **options)
workers = [ProcessSpec(f"combined-{n}", "combined", "m", ()) for n in range(WORKERS)]
specs = [*workers, ProcessSpec("r", "router", "m", ())]
with session.local_ray("gpus", sys.argv[1], local_resources(specs)) as here:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Supervisor:
        def sees(self):
            return ProcessSpec("x", "combined", "m", ()).environment().get("CUDA_VISIBLE_DEVICES")

    demands = bundles(specs, here.resources, gpu_share("cuda", WORKERS, here.gpus))
    group = placement_group(demands, strategy="PACK")
    actors = [
        ray.remote(Supervisor).options(
            num_cpus=0,
            num_gpus=demand.pop("GPU", 0),
            resources=demand,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index, demand in enumerate(demands)
    ]
    print(json.dumps(ray.get([actor.sees.remote() for actor in actors])))
"""


@pytest.fixture
def ray_dir() -> Iterator[str]:
    directory = make_ray_dir()
    yield f"{directory}/ray"
    clear_ray_dir(directory)


def test_workers_share_the_gpus_evenly_and_see_no_other(ray_dir: str) -> None:
    """Also where the environment tells Ray to leave that to its users."""
    environment = {**os.environ, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, ray_dir], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    *workers, router = json.loads(ran.stdout.splitlines()[-1])
    assert sorted(workers) == ["0", "0", "1", "1", "2", "2"]
    assert router is None
