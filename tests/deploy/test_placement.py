import pytest

from cpd.common.errors import ConfigError
from cpd.common.settings import ClusterSettings
from deploy.placement import bundles, gpu_share, local_resources
from deploy.processes import processes
from tests.secret import secret_file

SPECS = processes(ClusterSettings(model="m", prefill=2, combined=1, routers=1, secret_file=secret_file()), "127.0.0.1")


def test_a_local_ray_has_exactly_what_the_cluster_takes() -> None:
    resources = local_resources(SPECS)
    assert resources == {"cpd_combined": 1, "cpd_prefill": 2, "cpd_router": 1}
    assert bundles(SPECS, resources, 0) == [
        {"cpd_combined": 1},
        {"cpd_prefill": 1},
        {"cpd_prefill": 1},
        {"cpd_router": 1},
    ]


def test_without_declared_roles_workers_take_a_cpu_each() -> None:
    assert bundles(SPECS, {"CPU": 8}, 0) == [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}, {"CPU": 0.01}]


def test_only_workers_take_gpus() -> None:
    assert [demand.get("GPU") for demand in bundles(SPECS, {"CPU": 8, "GPU": 3}, 1.0)] == [1, 1, 1, None]


def test_a_role_with_too_few_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 of the resource cpd_prefill, and 2 are needed"):
        bundles(SPECS, {"CPU": 8, "cpd_prefill": 1}, 0)


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "share"),
    [
        ("cpu", 2, 8, 0),
        ("auto", 2, 0, 0),
        ("auto", 2, 2, 1),
        ("cuda", 2, 8, 1),
        ("auto", 2, 1, 0.5),
        ("cuda", 3, 2, 0.5),
    ],
)
def test_workers_share_gpus_only_when_there_are_too_few(device: str, workers: int, gpus: float, share: float) -> None:
    assert gpu_share(device, workers, gpus) == share


def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        gpu_share("cuda", 1, 0)
